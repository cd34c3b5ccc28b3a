"""What somebody who mistyped a name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_NAMES = 3


def meant(names: str | Iterable[str], known: Iterable[str]) -> str:
    """Return ` Did you mean …?` with the known names nearest to those that are not known; empty if none is near."""
    known = list(known)
    asked = [names] if isinstance(names, str) else list(names)
    near = [
        hit for name in asked for hit in difflib.get_close_matches(name, known, n=1 if len(asked) > 1 else MAX_NAMES)
    ]
    near = list(dict.fromkeys(near))
    return f" Did you mean {' or '.join(near) if len(asked) == 1 else ', '.join(near)}?" if near else ""
