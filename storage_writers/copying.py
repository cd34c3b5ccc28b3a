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

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into host memory of its shape and dtype; from an accelerator it is over after `finish`."""
        stream = self._streams.get(source.device)
        with torch.no_grad():
            if stream is None:
                target.copy_(source)
                return
            with self._entering, stream:
                target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait until every copy that was begun is over."""
        for stream in self._streams.values():
            stream.synchronize()

    def bytes_of(self, block: torch.Tensor) -> memoryview:
        """Return the bytes of a tensor; those of a contiguous one on the CPU are its own memory."""
        if block.device in self._streams:
            host = torch.empty(block.shape, dtype=block.dtype, device="cpu")
            self.copy(host, block)
            self.finish()
            block = host
        return bytes_of(block)
