"""A local file that is never seen in part, and what is refused as one."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckptstore.errors import InvalidInputError

HINT = "Choose a folder that exists, that you may write to, and that has room."


def write_whole(path: str | os.PathLike[str], text: bytes) -> None:
    """Write a file whole: beside it first, then renamed. Where a link stands, what it names is written.

    Raises:
        InvalidInputError: It cannot be written there, or what stands there is no regular file.

    If killed: the file as it was before or after; perhaps a temporary one beside it.
    """
    target = file_at(path)
    with _told(path):
        temporary = _beside(target)
        try:
            temporary.write_bytes(text)
            temporary.replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def check_writable(path: str | os.PathLike[str], *, outside: str = "") -> None:
    """Check that `write_whole` will be able to write a file, before the work whose result it takes.

    Args:
        path: The file.
        outside: See `file_at`.

    Raises:
        InvalidInputError: It cannot be written there, what stands there is no regular file, or it is inside the run.

    If killed: perhaps an empty temporary file beside it.
    """
    target = file_at(path, outside=outside)
    with _told(path):
        temporary = _beside(target)
        temporary.write_bytes(b"")
        temporary.unlink()


def file_at(path: str | os.PathLike[str], *, outside: str = "") -> Path:
    """Return the regular file that a path means, which need not exist yet: a link's target.

    Args:
        path: The file.
        outside: The root of a run, as its store says it: where that is local, nothing in it is the user's to write.

    Raises:
        InvalidInputError: The path is none, what stands there is no regular file, or it is inside the run.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text or not _has_bytes(text):
        raise InvalidInputError(f"A file must be named by a path, not by {path!r:.80}.", hint="Name a file.")
    with _told(path):
        target = Path(os.path.realpath(text))
        try:
            is_file = stat.S_ISREG(os.stat(text).st_mode)  # noqa: PTH116  (as the kernel sees it: /dev/stdout, say)
        except FileNotFoundError:
            is_file = not text.endswith("/")
    if not is_file:
        raise InvalidInputError(
            f"{text} cannot be written: it is no regular file.", hint="Name a file, or one that is not there yet."
        )
    if outside.startswith("file://") and target.is_relative_to(os.path.realpath(outside.removeprefix("file://"))):
        raise InvalidInputError(f"{text} is inside the run {outside}.", hint="Name a file outside of it.")
    return target


def _has_bytes(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _beside(target: Path) -> Path:
    return target.with_name(f"{target.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def _told(path: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be written: {error.strerror}.", hint=HINT, path=str(path)) from error
