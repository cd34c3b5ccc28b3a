"""Tensors that are not loaded as they are, but made from what was saved."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptstore import Checkpoint
from ckptstore.format.dtypes import BYTES
from ckptstore.training.migrate import Form, Migrator, migrated
from storage_writers.tensors import dtype_name, dtype_of


def forms_of(held: Checkpoint | Mapping[str, torch.Tensor]) -> dict[str, Form]:
    """Return dtype and global shape of each tensor, by key."""
    if isinstance(held, Checkpoint):
        return {key: (each.dtype, each.shape) for key, each in held.keys.items() if each.dtype != BYTES}
    return {key: (dtype_name(each.dtype, key=key), tuple(each.shape)) for key, each in held.items()}


def migrate(checkpoint: Checkpoint, targets: Mapping[str, torch.Tensor], migrators: Mapping[str, Migrator]) -> None:
    """Fill the targets that migrators make; each is read whole, on every rank. Collective.

    Args:
        checkpoint: What was saved.
        targets: By key; DTensors get their share.
        migrators: By key, in the same order on all ranks.

    Raises:
        IncompatibleStateError: A migrator made something that does not fit.
        IntegrityError: Bytes are not what was written.
    """
    for key in sorted(migrators):
        target = targets[key].detach()
        whole = (target.full_tensor() if isinstance(target, DTensor) else target).cpu()
        saved = _read(checkpoint, key) if key in checkpoint.keys else None
        made = migrated(migrators[key], key, saved=saved, target=whole)
        if isinstance(target, DTensor):
            made = distribute_tensor(made.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(made)


def _read(checkpoint: Checkpoint, key: str) -> torch.Tensor:
    dtype = dtype_of(checkpoint.keys[key].dtype, key=key)
    raw = bytearray(checkpoint.read(key).tobytes())
    return (
        torch.frombuffer(raw, dtype=dtype).reshape(checkpoint.keys[key].shape)
        if raw
        else torch.empty(checkpoint.keys[key].shape, dtype=dtype)
    )
