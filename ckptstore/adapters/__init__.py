"""Trainings of other libraries, saved and resumed whole: one module for each library, which it imports.

`huggingface` (transformers' Trainer), `accelerate` (loops of one's own), `lightning`. Importing this package imports
none of them. What stands here is what they have in common.
"""

from __future__ import annotations

from ckptstore.errors import UnsupportedError


def missing(extra: str, error: ImportError) -> UnsupportedError:
    """Return what to raise if an adapter's library is not installed.

    Args:
        extra: What to install `ckptstore` with.
        error: Why the import failed.
    """
    return UnsupportedError(
        f"ckptstore.adapters.{extra} cannot import its library: {error}.",
        hint=f"Run: pip install 'ckptstore[{extra}]'.",
    )
