"""Who reigns: incarnations, their terms, and how a newer one fences the older (I3, I15)."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, Literal, get_args

from ckptstore.clock import IdSource, SystemIds
from ckptstore.errors import ConflictError, FencedError, InvalidInputError
from ckptstore.events import Claimed, tell
from ckptstore.format.records import Claim
from ckptstore.protocol.fold import Fold, Reign
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.lost import check_not_lost

Takeover = Literal["always", "same_job"]

MAX_WHO_BYTES = 1024


class Incarnation:
    """One start of a training job, made once per coordinator process and run. Picklable; thread-safe.

    Later writer objects, and the child process of an async save, carry the same incarnation and so its term: no
    incarnation fences itself (I15).

    Args:
        id: 32 hexadecimal digits that no other start has.
        job: What the scheduler calls the job; the same over its restarts.
        host: Where it runs, for people.
    """

    def __init__(self, id: str, *, job: str, host: str) -> None:  # noqa: A002  (the record's own word)
        check_who(job=job, host=host)
        self.id, self.job, self.host = id, job, host
        self.loaded: int | None = None
        """seq of the checkpoint that this process loaded: the parent of its first commit."""
        self.doubted: set[str] = set()
        """Attempts whose commit may still land, though nobody could say so when it was tried."""
        self._term: int | None = None
        self._attempts = 0
        self._fenced: FencedError | None = None
        self._lock = threading.Lock()

    @classmethod
    def new(cls, *, job: str, ids: IdSource | None = None, host: str | None = None) -> Incarnation:
        """Return the incarnation of a process that starts now."""
        return cls((ids or SystemIds()).nonce(), job=job, host=host or f"{socket.gethostname()}:{os.getpid()}")

    @property
    def term(self) -> int | None:
        """The term it has; None before its claim."""
        return self._term

    @property
    def fenced(self) -> bool:
        """Whether a newer incarnation was seen. It stays so."""
        return self._fenced is not None

    def check(self) -> None:
        """Raise FencedError, again, if this incarnation is fenced."""
        if self._fenced is not None:
            raise FencedError(self._fenced.message, hint=self._fenced.hint, **self._fenced.facts)

    def reigns_as(self, term: int) -> None:
        """Take `term`, which the log says is this incarnation's."""
        with self._lock:
            if self._term != term:
                self._term, self._attempts = term, 0

    def next_attempt(self, fold: Fold) -> int:
        """Take the next attempt number: above all that this process took and that this term committed (I7)."""
        with self._lock:
            committed = fold.tip.attempt if fold.tip else 0
            self._attempts = max(self._attempts, committed) + 1
            return self._attempts

    def fence(self, by: Reign) -> FencedError:
        """Remember that `by` has claimed since, and return the error to raise."""
        error = FencedError(
            f"Term {by.term} of job {by.job!r} on {by.host} claimed this run at {by.written_at}; "
            f"this process ({self.job!r} on {self.host}) must not save to it any more.",
            hint="Stop this process; to go on here instead, restart it: a new start claims the run.",
            term=by.term,
            own_term=self._term,
            job=by.job,
            host=by.host,
            seq=by.seq,
        )
        with self._lock:
            self._fenced = self._fenced or error
        return error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def check_who(**names: object) -> None:
    """Check that each is text that a claim can record.

    Raises:
        InvalidInputError: One is not; it is named.
    """
    for name, value in names.items():
        if not isinstance(value, str) or not 0 < len(value.encode(errors="replace")) <= MAX_WHO_BYTES:
            raise InvalidInputError(
                f"{name} must be text of 1 to {MAX_WHO_BYTES} bytes, not {value!r:.80}.",
                hint=f"Pass a short {name}='...', or leave it out.",
                option=name,
            )


def check_takeover(takeover: object) -> None:
    """Check that `takeover` is one of the two: anything else must not count as `always`.

    Raises:
        InvalidInputError: It is not.
    """
    if takeover not in get_args(Takeover):
        raise InvalidInputError(
            f"takeover must be one of {', '.join(get_args(Takeover))}, not {takeover!r:.80}.",
            hint="Pass takeover='same_job', or leave it out.",
            option="takeover",
        )


def reigns(fold: Fold, incarnation: Incarnation) -> bool:
    """Say whether the newest claim is this incarnation's."""
    return fold.claim is not None and fold.claim.incarnation == incarnation.id


def check_not_fenced(fold: Fold, incarnation: Incarnation, term: int | None) -> None:
    """Raise FencedError, now and ever after, if a newer incarnation has claimed since this one did (I3, I15).

    Args:
        fold: All that is known of the log.
        incarnation: Whose turn it is; it is marked.
        term: The term under which it acts; None if it knows of none, although a claim of its may stand in the log: of
            another process that carries it, or of a request whose outcome was unknown.
    """
    incarnation.check()
    own = term if term is not None else fold.reigns.get(incarnation.id)
    if own is not None and fold.claim is not None and fold.fences(own):
        raise incarnation.fence(fold.claim)


def claim(log: RunLog, incarnation: Incarnation, *, takeover: Takeover = "always") -> int:
    """Begin the incarnation's reign unless it reigns already, and return its term. Refresh the log first.

    Raises:
        InvalidInputError: `takeover` is neither `always` nor `same_job`.
        FencedError: A newer incarnation has claimed. It is raised ever after.
        ConflictError: `takeover` is `same_job` and the newest claim is of another job.
        IntegrityError: The log was lost; see `check_not_lost`.
        CommitUnknownError: Whether the claim stands is not known; the next call finds out.

    If killed: the claim stands or not. If it does, everybody older is fenced; no answer about what exists changes.
    """
    check_takeover(takeover)
    check_not_lost(log)

    def decide(fold: Fold) -> Claim | None:
        if reigns(fold, incarnation):
            return None
        check_not_fenced(fold, incarnation, incarnation.term)
        if takeover == "same_job" and fold.claim is not None and fold.claim.job != incarnation.job:
            raise _not_ours(fold, fold.claim, incarnation)
        return Claim(fold.term + 1, incarnation.id, incarnation.job, incarnation.host)

    before = log.fold.claim
    appended = log.append(decide)
    reign = log.fold.claim
    if reign is None:
        raise AssertionError("a claim was appended and is not there")
    if reign.incarnation != incarnation.id:  # it was another thread's turn since
        raise incarnation.fence(reign)
    incarnation.reigns_as(reign.term)
    if appended is not None:
        over = before.job if before else None
        tell(log.observer, Claimed(run=log.fold.run, seq=reign.seq, term=reign.term, took_over_from=over))
    return reign.term


def _not_ours(fold: Fold, claim: Reign, incarnation: Incarnation) -> ConflictError:
    last = f"its last commit is slot {fold.tip.seq}" if fold.tip else "it has not committed since"
    return ConflictError(
        f"Job {claim.job!r} on {claim.host} has held this run since {claim.written_at} (term {claim.term}; {last}); "
        f"this is job {incarnation.job!r}.",
        hint='Stop the other job, or pass takeover="always".',
        job=claim.job,
        host=claim.host,
        term=claim.term,
        last_commit=fold.tip.seq if fold.tip else None,
    )
