"""What can go wrong, grouped by what the caller does next.

```
CkptStoreError
├── ConflictError                 somebody else was first: read again, decide again
│   └── AlreadyExistsError        a conditional create met an object (perhaps our own: read it back)
├── FencedError                   a newer incarnation reigns: stop
├── SupersededError               a later attempt of this job committed: drop this one
├── BusyError                     one save is outstanding already
├── StalledError                  no progress within the limit
├── DisagreementError             ranks differ or are missing (they are named)
├── NotFoundError                 provably absent
├── UncommittedError              data exists, no commit does
├── IntegrityError                bytes or records are not what was written: never retry
│   └── UnsafePickleError         a value would need pickle
├── UnavailableError              did not happen: retry
├── AccessDeniedError             the store refused these credentials
├── OutcomeUnknownError           may or may not have happened: read back first
│   └── CommitUnknownError        the same, of a record in the log
├── UnsupportedError              this store, format or value cannot do it
├── InvalidInputError             also a ValueError
└── ResumeError                   nothing that may be resumed
    └── IncompatibleStateError    target and checkpoint do not fit
```

Every error has a stable `code`, `facts` (plain values by name) and a `hint`: one sentence with the command to run.
All survive pickling, because errors of one rank are sent to the others.
"""

from __future__ import annotations

from typing import ClassVar

Fact = str | int | float | bool | None | list["Fact"] | dict[str, "Fact"]


def _plain(value: object) -> Fact:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    return str(value)


class CkptStoreError(Exception):
    """The root of the tree.

    Args:
        message: What happened, with values.
        hint: One sentence that says what to do next, with the command to run.
        facts: Plain values by name; anything else is turned into text, so that the error survives pickling.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts: dict[str, Fact] = {name: _plain(value) for name, value in facts.items()}

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.facts)


def _rebuild(kind: type[CkptStoreError], message: str, hint: str, facts: dict[str, Fact]) -> CkptStoreError:
    error = kind(message, hint=hint)
    error.facts = facts
    return error


class ConflictError(CkptStoreError):
    """Somebody else was first. Read again and decide again."""

    code = "conflict"


class AlreadyExistsError(ConflictError):
    """A conditional create met an object, which may be our own: read it back."""

    code = "already_exists"


class FencedError(CkptStoreError):
    """A newer incarnation has claimed the run. This process must stop saving; it stays so."""

    code = "fenced"


class SupersededError(CkptStoreError):
    """A later attempt of the same term has committed. This attempt can never commit."""

    code = "superseded"


class BusyError(CkptStoreError):
    """One save is outstanding already."""

    code = "busy"


class StalledError(CkptStoreError):
    """No progress within the stated limit."""

    code = "stalled"


class DisagreementError(CkptStoreError):
    """Ranks differ or are missing; `facts` names them."""

    code = "disagreement"


class NotFoundError(CkptStoreError):
    """What was asked for is provably absent."""

    code = "not_found"


class UncommittedError(CkptStoreError):
    """Data of an attempt exists, but no commit makes it a checkpoint."""

    code = "uncommitted"


class IntegrityError(CkptStoreError):
    """Bytes or records are not what was written. Never retried."""

    code = "integrity"


class UnsafePickleError(IntegrityError):
    """A value could only be read or written by unrestricted pickle."""

    code = "unsafe_pickle"


class UnavailableError(CkptStoreError):
    """It did not happen. It may be tried again."""

    code = "unavailable"


class AccessDeniedError(CkptStoreError):
    """The store refused these credentials."""

    code = "access_denied"


class OutcomeUnknownError(CkptStoreError):
    """A request may or may not have been carried out. Read back before doing anything else."""

    code = "outcome_unknown"


class CommitUnknownError(OutcomeUnknownError):
    """A record may or may not stand in the log. Delete nothing; the next append decides."""

    code = "commit_unknown"


class UnsupportedError(CkptStoreError):
    """This store, format version or value cannot do what was asked."""

    code = "unsupported"


class InvalidInputError(CkptStoreError, ValueError):
    """An argument or a stored value is outside of what is allowed."""

    code = "invalid_input"


class ResumeError(CkptStoreError):
    """There is nothing that may be resumed."""

    code = "resume"


class IncompatibleStateError(ResumeError):
    """The target and the checkpoint do not fit: keys, shapes or dtypes differ."""

    code = "incompatible_state"
