"""What fsspec's file systems raise, read into an `Answer`: by class, then by the system's number; never by text."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
)
from ckptstore.objectstore.answers import Answer, Request, error_for
from ckptstore.objectstore.durable import KIND_BY_ERRNO

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What says that there is no object of exactly this key."""

_OPTIONS = "Check storage_options: fsspec hands them on as they are."
_BLOCKED = Answer(
    kind=UnsupportedError,
    reason="what is needed above it is absent, or something else stands in its way",
    hint="Look at what stands there, and above it.",
)


# By class; the first line that fits counts. What says "absent" comes before.
_KINDS: tuple[tuple[type[Exception], Answer], ...] = (
    (FileExistsError, Answer(kind=AlreadyExistsError, reason="something is there")),
    (PermissionError, Answer(kind=AccessDeniedError, reason="denied")),
    (NotImplementedError, Answer(kind=UnsupportedError, reason="this file system cannot do it")),
    (TypeError, Answer(kind=UnsupportedError, reason="it does not take what it is given", hint=_OPTIONS)),
    (TimeoutError, Answer(reason="no answer in time", stalled=True)),
)


def answer_of(error: Exception, request: Request) -> Answer:
    """Return what is known of a call that raised `error`."""
    if isinstance(error, ABSENT):
        return _BLOCKED if request.writes else Answer(kind=NotFoundError, reason="absent")
    for kind, answer in _KINDS:
        if isinstance(error, kind):
            return answer
    number = (error.errno or 0) if isinstance(error, OSError) else 0
    ours = KIND_BY_ERRNO.get(number)
    said = errno.errorcode.get(number, type(error).__name__)
    # What else a number says holds for a file that is written beside its name; here a part may stand there.
    return Answer(kind=ours if ours in (AccessDeniedError, InvalidInputError) else None, reason=said)


@contextlib.contextmanager
def translating(request: Request) -> Iterator[None]:
    """Let nothing foreign out of the block.

    Raises:
        CkptStoreError: What went wrong, as ours.
    """
    try:
        yield
    except CkptStoreError:
        raise
    except Exception as error:  # noqa: BLE001  (every file system raises its own)
        # `from None`: the text may hold credentials; of many clients nobody knows.
        raise error_for(answer_of(error, request), request) from None
