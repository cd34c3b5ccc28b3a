"""Copies of the caller's tensors into host memory, on the CPU or by an own stream on each accelerator."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from storage_writers.tensors import bytes_of


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
