"""Whether ranks hold the same tensors, seen from a few of their elements: all of them would cost as much as a save."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from blake3 import blake3
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptstore.format.checksum import digest
from storage_writers.tensors import lasting_pieces

MAX_TENSORS = 64
"""So many of a component are looked at, in an order drawn from their names."""
ELEMENTS = 64
"""So many at each end of one."""


def sample_of(tensors: Mapping[str, torch.Tensor], *, without: Collection[str] = ()) -> str:
    """Return a digest of a few elements of plain tensors: other ones on two ranks are most likely seen in it.

    Args:
        tensors: By key. Shares of a `DTensor` differ by nature, and are left out.
        without: Keys that are not looked at.
    """
    keys = [key for key, each in tensors.items() if not isinstance(each, DTensor) and key not in without]
    summary = blake3()
    for key in sorted(keys, key=lambda key: (digest(key.encode()), key))[:MAX_TENSORS]:
        summary.update(key.encode())
        for end in _ends(tensors[key].detach()):
            for piece in lasting_pieces(end):
                summary.update(piece)
    return summary.hexdigest()


def _ends(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    while tensor.dim() and not tensor.is_contiguous():  # flattened whole, it would be copied whole
        tensor = tensor[0] if len(tensor) else tensor.new_empty(0)
    flat = tensor.reshape(-1)
    yield flat[:ELEMENTS].clone()
    yield flat[max(0, flat.numel() - ELEMENTS) :].clone()


def are_handed_out(module: nn.Module) -> bool:
    """Say whether replicas get the buffers of the lowest rank before each forward pass, so that theirs do not count."""
    return any(isinstance(each, DistributedDataParallel) and each.broadcast_buffers for each in module.modules())
