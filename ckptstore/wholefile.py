"""A local file that is never seen in part."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ckptstore.errors import InvalidInputError


def write_whole(path: Path, text: bytes) -> None:
    """Write a file whole: beside it first, then renamed.

    Raises:
        InvalidInputError: It cannot be written there.

    If killed: the file as it was before or after; perhaps a temporary one beside it.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise InvalidInputError(
            f"{path} cannot be written: {error.strerror}.", hint="Name a file in a folder that exists.", path=str(path)
        ) from error
