"""Memory that an engine may keep without a copy, as it may keep `bytes`."""

from __future__ import annotations

from typing import Any

import numpy as np


class Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory on loan: its owner leaves it alone as long as anything refers to it, and learns when nothing does.

    A view of it (`memoryview`, and slices of that) is such a reference. A client that sends a part again holds one for
    as long as it may do so; that is what makes it safe.
    """


ENGINES_THAT_KEEP = frozenset({"obstore"})
"""Engines that keep what they are lent until it has been sent. The others are done with it when `write` returns."""


def may_be_kept(view: memoryview) -> bool:
    """Return whether the bytes of `view` stay what they are as long as the view is kept."""
    return isinstance(view.obj, bytes | Lent)
