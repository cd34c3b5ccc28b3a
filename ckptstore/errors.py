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

Every error has a stable `code`, `facts` (plain values by name) and a `hint`: one sentence that says what to do next,
with the command to run. Where whoever raises one knows nothing better, it is the usual one of its kind.
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
        hint: One sentence that says what to do next, with the command to run; by default the kind's `usual_hint`.
        facts: Plain values by name; anything else is turned into text, so that the error survives pickling.
    """

    code: ClassVar[str] = "error"
    usual_hint: ClassVar[str] = "See the log of the rank that is named."

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.usual_hint
        self.facts: dict[str, Fact] = {name: _plain(value) for name, value in facts.items()}

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.facts)


def safe_text(error: BaseException) -> str:
    """Return what an event may say of an error: of one that is not ours its type alone, whose text may hold secrets."""
    return str(error) if isinstance(error, CkptStoreError) else type(error).__name__


def _rebuild(kind: type[CkptStoreError], message: str, hint: str, facts: dict[str, Fact]) -> CkptStoreError:
    error = kind(message, hint=hint)
    error.facts = facts
    return error


class ConflictError(CkptStoreError):
    """Somebody else was first. Read again and decide again."""

    code = "conflict"
    usual_hint = "Read again what stands there: `ckptstore log URL`."


class AlreadyExistsError(ConflictError):
    """A conditional create met an object, which may be our own: read it back."""

    code = "already_exists"
    usual_hint = "Read it back: it may be your own."


class FencedError(CkptStoreError):
    """A newer incarnation has claimed the run. This process must stop saving; it stays so."""

    code = "fenced"
    usual_hint = "Stop this process; `ckptstore log URL` shows who claimed the run."


class SupersededError(CkptStoreError):
    """A later attempt of the same term has committed. This attempt can never commit."""

    code = "superseded"
    usual_hint = "Drop this attempt; the next save goes on."


class BusyError(CkptStoreError):
    """One save is outstanding already."""

    code = "busy"
    usual_hint = "Wait for the save that is under way."


class StalledError(CkptStoreError):
    """No progress within the stated limit."""

    code = "stalled"
    usual_hint = "Look at what the store is doing, and try again."


class DisagreementError(CkptStoreError):
    """Ranks differ or are missing; `facts` names them."""

    code = "disagreement"
    usual_hint = "Pass the same on every rank, and look for the first rank that failed."


class NotFoundError(CkptStoreError):
    """What was asked for is provably absent."""

    code = "not_found"
    usual_hint = "Run `ckptstore ls URL --all` to see what is there."


class UncommittedError(CkptStoreError):
    """Data of an attempt exists, but no commit makes it a checkpoint."""

    code = "uncommitted"
    usual_hint = "Load another checkpoint; `ckptstore ls URL` lists what is committed."


class IntegrityError(CkptStoreError):
    """Bytes or records are not what was written. Never retried."""

    code = "integrity"
    usual_hint = "Run `ckptstore verify URL --all --level full`, and load an older checkpoint."


class UnsafePickleError(IntegrityError):
    """A value could only be read or written by unrestricted pickle."""

    code = "unsafe_pickle"
    usual_hint = "Store plain values instead; pass allow_pickle=True only for a run whose writers you trust."


class UnavailableError(CkptStoreError):
    """It did not happen. It may be tried again."""

    code = "unavailable"
    usual_hint = "It did not happen: try again once the store answers, with `ckptstore ls URL`, say."


class AccessDeniedError(CkptStoreError):
    """The store refused these credentials."""

    code = "access_denied"
    usual_hint = "Check the credentials or permissions: reading, writing, deleting and listing are needed."


class OutcomeUnknownError(CkptStoreError):
    """A request may or may not have been carried out. Read back before doing anything else."""

    code = "outcome_unknown"
    usual_hint = "Read back what is there before anything else: `ckptstore log URL`."


class CommitUnknownError(OutcomeUnknownError):
    """A record may or may not stand in the log. Delete nothing; the next append decides."""

    code = "commit_unknown"
    usual_hint = "Delete nothing. Run `ckptstore log URL`, or save again: the next append decides."


class UnsupportedError(CkptStoreError):
    """This store, format version or value cannot do what was asked."""

    code = "unsupported"
    usual_hint = "Use another store, dtype or value; or a newer release: `pip install --upgrade ckptstore`."


class InvalidInputError(CkptStoreError, ValueError):
    """An argument or a stored value is outside of what is allowed."""

    code = "invalid_input"
    usual_hint = "Correct what is named, and call again."


class ResumeError(CkptStoreError):
    """There is nothing that may be resumed."""

    code = "resume"
    usual_hint = "Run `ckptstore ls URL --all` to see what is there, and why it is set aside."


class IncompatibleStateError(ResumeError):
    """The target and the checkpoint do not fit: keys, shapes or dtypes differ."""

    code = "incompatible_state"
    usual_hint = "Run `ckptstore show URL NAME --keys`, and give the target these keys, shapes and dtypes."
