"""A state copied into host memory before the call returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from storage_writers import tensors


class StagingPool:
    """Copies states."""

    def __init__(self, *, staging_bytes: int | None = None, local_ranks: int = 1) -> None:
        del staging_bytes, local_ranks

    def stage(self, state_dict: dict[str, Any]) -> Staged:
        """Return a copy."""
        stager = DefaultStager(StagingOptions(*[False] * 4))  # nothing pinned, shared or later, as by DCP itself
        staged = Staged(cast("dict[str, Any]", stager.stage(state_dict)))
        stager.close()
        return staged

    def close(self) -> None:
        """Free what is held."""


class Staged:
    """A copy of a state."""

    is_whole = True

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def fence(self, *, seconds: float) -> None:
        """Return when the caller's tensors may be changed."""

    def wait_copied(self, *, seconds: float) -> None:
        """Return when all is copied."""

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor."""
        yield from (memoryview(piece) for piece in tensors.pieces(tensor))

    def end(self) -> None:
        """Drop every reference."""
        self.state.clear()
