"""Copies of the caller's tensors into host memory, on the CPU or by an own stream on each accelerator."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from ckptstore.units import MIB
from storage_writers.capturing import Source
from storage_writers.tensors import bytes_of, copyable

_BATCH_BYTES, _BATCH_COUNT = 128 * MIB, 1024


class Lanes:
    """The ways on which copies run: the CPU, and a stream for each accelerator.

    The streams begin after what the thread that makes them has asked of the accelerators so far.

    Args:
        devices: Where the tensors are that will be copied.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        for device in sorted(set(devices), key=str):
            if device.type != "cpu":
                stream = self._streams[device] = torch.Stream(device)
                stream.wait_stream(torch.accelerator.current_stream(device))
        self._entering = threading.Lock()  # a stream remembers what it replaced, for one thread at a time

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy tensors of one device into host memory of their shapes and dtypes.

        From an accelerator it is over only after `finish`.
        """
        stream = self._streams.get(sources[0].device)
        with torch.no_grad():
            if stream is None:
                torch._foreach_copy_(targets, sources)
                return
            with self._entering, stream:
                torch._foreach_copy_(targets, sources, non_blocking=True)

    def finish(self) -> None:
        """Wait until every copy that was begun is over."""
        for stream in self._streams.values():
            stream.synchronize()

    def bytes_of(self, block: torch.Tensor) -> memoryview:
        """Return the bytes of a tensor; those of a contiguous one on the CPU are its own memory."""
        if block.device in self._streams:
            host = torch.empty(block.shape, dtype=block.dtype, device="cpu")
            self.copy([host], [block])
            self.finish()
            block = host
        return bytes_of(block)


def batches(places: Sequence[Source]) -> Iterator[list[Source]]:
    """Yield places, in their order, in batches of one device each; a large tensor by itself."""
    batch, nbytes, device = list[Source](), 0, None
    for place in places:
        assert place.tensor is not None  # noqa: S101  (it is not copied yet)
        here = place.tensor.device
        if batch and (nbytes + place.nbytes > _BATCH_BYTES or len(batch) == _BATCH_COUNT or here != device):
            yield batch
            batch, nbytes = [], 0
        batch.append(place)
        nbytes += place.nbytes
        device = here
    if batch:
        yield batch


def copied_to(place: Source) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where a tensor is copied to, and what is copied there."""
    assert place.staged is not None  # noqa: S101  (it has a place)
    assert place.tensor is not None  # noqa: S101  (it is not copied yet)
    return copyable(place.staged), copyable(place.tensor)
