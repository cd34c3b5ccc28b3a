"""The desk: a run's checkpoints, without torch. It only forwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ckptstore.checkpoint import Checkpoint
from ckptstore.clock import SystemClock, SystemIds
from ckptstore.events import Observer, silent
from ckptstore.format.records import SetAside
from ckptstore.maintenance.repair import Repair
from ckptstore.maintenance.scrub import Scrub
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol.catalog import Catalog, Reason, Uncommitted
from ckptstore.protocol.fold import Committed, Ignored, Reign
from ckptstore.protocol.log import Entry, RunLog
from ckptstore.protocol.lost import check_may_append, check_not_lost
from ckptstore.protocol.shares import Share
from ckptstore.protocol.traces import write_trace
from ckptstore.protocol.verify import Level, Progress, Verdict, readable_records, unwatched
from ckptstore.retiring import Retiring
from ckptstore.signing import Signing


class CheckpointStore(Retiring):
    """A run: its root, its log, its checkpoints. Opening creates nothing and claims nothing."""

    def __init__(self, log: RunLog, transfer: TransferOptions, *, again: Callable[[], ObjectStore]) -> None:
        self._store, self._log, self._transfer, self._again = log.store, log, transfer, again
        self._catalog = Catalog(log)

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        engine: str | None = None,
        storage_options: Mapping[str, object] | None = None,
        transfer: TransferOptions | None = None,
        log: LogOptions | None = None,
        observer: Observer = silent,
    ) -> CheckpointStore:
        """Return the run at `url`; an absent run is an empty one.

        Args:
            url: A plain path, `file://`, `s3://`, `gs://`, `az://`, `memory://`, or what fsspec knows.
            engine: What moves the bytes, where a scheme has several.
            storage_options: Credentials, endpoint, region, by s3fs's and gcsfs's usual names.
            transfer: How bytes are moved.
            log: How records are appended, by `pin`, `rollback` and the like, and who must have signed them.
            observer: Told of records that were ignored and tails that were lost.

        Raises:
            InvalidInputError: The URL or an option is wrong.
            IntegrityError: The log is damaged.
            UnsupportedError: A newer version wrote `run.json`. Of a newer record in the log the first question tells.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        transfer = transfer or TransferOptions()
        again = partial(open_store, url, engine=engine, storage_options=storage_options, transfer=transfer)
        run = RunLog.open(again(), clock=SystemClock(), ids=SystemIds(), options=log or LogOptions(), observer=observer)
        return cls(run, transfer, again=again)

    @staticmethod
    def readable_records(
        url: str | os.PathLike[str],
        *,
        engine: str | None = None,
        storage_options: Mapping[str, object] | None = None,
        signing: Signing | None = None,
    ) -> Iterator[Entry]:
        """Yield the records of a log that may be damaged, up to the last one before the damage.

        For people, after `open` has raised: nothing may be decided by a log that is not whole. One not signed as
        `signing` says is damage.

        Raises:
            InvalidInputError: The URL or an option is wrong.
            UnsupportedError: The run is of a newer version.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        return readable_records(open_store(url, engine=engine, storage_options=storage_options), signing=signing)

    @property
    def url(self) -> str:
        """The run's root, without secrets."""
        return self._store.url

    @property
    def run(self) -> str | None:
        """The run's identity; None while nothing was ever written."""
        return self._log.run

    def check_not_lost(self) -> None:
        """Check that what is here is not what is left of a run whose log was lost. Every question about it does.

        Raises:
            IntegrityError: It is: `latest.json` or data tell of a commit, and the log of none.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        check_not_lost(self._log)

    def check_may_append(self) -> None:
        """Check that `LogOptions.refuse_lost_tail` does not forbid to append to this log. Every append does.

        Raises:
            IntegrityError: It does: the log lost its newest records.
        """
        check_may_append(self._log)

    def latest(self) -> Checkpoint | None:
        """Return the newest selectable checkpoint: the highest seq, not the highest step. None on an empty run.

        Raises:
            ResumeError: There are commits, but none may be selected; each is listed with its reason.
            IntegrityError: The log is damaged.
            UnsupportedError: A newer version wrote to the log.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        committed = self._catalog.latest()
        return None if committed is None else self._checkpoint(committed)

    def checkpoints(self, *, include_set_aside: bool = False) -> list[Checkpoint]:
        """Return the selectable checkpoints, newest first; with those set aside, if asked for.

        Raises:
            IntegrityError: The log is damaged.
            UnsupportedError: A newer version wrote to the log.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        found = self._catalog.checkpoints(include_set_aside=include_set_aside)
        return [self._checkpoint(one) for one in reversed(found)]

    def get(self, checkpoint_id: str | None = None, *, step: int | None = None, seq: int | None = None) -> Checkpoint:
        """Return one checkpoint: the newest selectable of that name or step, or exactly `name@seq` or `seq`.

        Raises:
            NotFoundError: No commit is called so.
            UncommittedError: Attempts of that name left data, but no commit.
            InvalidInputError: Not exactly one of the three was given, or it is no text or no whole number.
            IntegrityError: The log is damaged.
            UnsupportedError: A newer version wrote to the log, and the answer may depend on it.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        return self._checkpoint(self._catalog.find(checkpoint_id, step=step, seq=seq))

    def uncommitted(self) -> list[Uncommitted]:
        """Return the attempts that left data and no commit, in progress or dead. Lists all data of the run.

        Raises:
            IntegrityError: The log is damaged.
            UnsupportedError: A newer version wrote to the log.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        return self._catalog.in_progress()

    def records(self) -> Iterator[Entry]:
        """Yield every record of the log, in order, each checked.

        Raises:
            IntegrityError: One is damaged or missing, or the log was lost.
            UnsupportedError: After the last that this version understands, if a newer one wrote more.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        self._log.read()
        yield from self._log.records()
        self._log.fold.whole()

    @property
    def ignored(self) -> Sequence[Ignored]:
        """The newest records that were invalid at their slot and therefore passed over."""
        return self._log.fold.ignored

    @property
    def reign(self) -> Reign | None:
        """The newest claim; None if nobody ever claimed the run."""
        return self._log.fold.claim

    @property
    def reign_has_committed(self) -> bool:
        """Whether the newest claim was followed by a commit of its own."""
        return self._log.fold.tip is not None

    @property
    def lost_from(self) -> int | None:
        """A slot that a hint names although the log ends before it: records were lost, or the hint is damaged."""
        return self._log.lost_from

    def verify(
        self, checkpoint: Checkpoint | str | None = None, *, level: Level | None = None, progress: Progress = unwatched
    ) -> Verdict:
        """Verify the log, and a checkpoint as deep as `level` says; what is wrong stands in the verdict.

        An object that is found damaged is read again over a connection of its own: see `Finding.confirmed`.

        Args:
            checkpoint: Which one, or what `get` finds it by: its name, or `name@seq`; None: the log alone.
            level: `chain` (records link), `exists` (sizes; the default for a checkpoint), `etag` (the store's own
                identity of the bytes), `full` (BLAKE3 of every byte).
            progress: Told how many bytes are hashed so far, and of how many.

        Raises:
            InvalidInputError: There is no such level, or it needs a checkpoint.
            NotFoundError: There is no such checkpoint. UncommittedError: it was never committed.
            IntegrityError: What was appended to the log since it was opened is damaged.
            UnsupportedError: A newer version wrote to the log; that is no verdict.
            UnavailableError: The store could not be read; that is no verdict. AccessDeniedError likewise.
        """
        committed = None if checkpoint is None else self._named(checkpoint).committed
        level = level or ("chain" if checkpoint is None else "exists")
        return self.scrub().verify(committed, level=level, progress=progress)

    def verify_kept(self, *, level: Level = "exists", progress: Progress = unwatched) -> Iterator[Verdict]:
        """Return a verdict on the log, then one on the data of each checkpoint, newest first, set aside or not.

        Each is made when it is asked for, and then raises what `verify` raises.

        Raises:
            InvalidInputError: There is no such level.
            IntegrityError: What was appended to the log since it was opened is damaged.
            UnsupportedError: With the first verdict: a newer version wrote to the log.
        """
        return self.scrub().verify_kept(level=level, progress=progress)

    def scrub(self, *, subset: tuple[int, int] = (1, 1)) -> Scrub:
        """Return a pass over the run's objects that can do more than `verify`: quarantine, record, reckon what is lost.

        Args:
            subset: `(k, n)`: the k-th of n shares of the objects, which together have each exactly once.

        Raises:
            InvalidInputError: There is no such share.
        """
        return Scrub(self._log, options=self._transfer, again=self._again, share=Share(*subset))

    def repair(self) -> Repair:
        """Return what may be done for a run that was damaged: hints, objects from a replica, a log that was lost."""
        return Repair(self._log, options=self._transfer, again=self._again)

    def pin(self, checkpoint: Checkpoint | str, *, holder: str, reason: str = "") -> bool:
        """Keep a checkpoint from being retired while `holder` holds it; False if it is pinned just so already.

        Args:
            checkpoint: Which one, or what `get` finds it by: its name, or `name@seq`.
            holder: Who holds it: a job, a person, a team.
            reason: Why; it is recorded.

        Raises:
            InvalidInputError: `holder` is no text, empty or too long.
            NotFoundError: There is none, or it is retired meanwhile. UncommittedError: it was never committed.
            CommitUnknownError: Whether it is pinned is not known; ask again.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: It was not done within the deadline. AccessDeniedError: the store refused.
            IntegrityError: The log is damaged; nothing was written.

        If killed: it is pinned or not.
        """
        return self._catalog.pin(self._named(checkpoint).seq, holder=holder, reason=reason) is not None

    def unpin(self, checkpoint: Checkpoint | str, *, holder: str) -> bool:
        """Let go of a checkpoint, or of what `get` finds by its name; False if `holder` does not hold it.

        Raises:
            InvalidInputError: `holder` is no text, empty or too long.
            NotFoundError: There is none, or it is retired meanwhile. UncommittedError: it was never committed.
            CommitUnknownError: Whether it is unpinned is not known; ask again.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: It was not done within the deadline. AccessDeniedError: the store refused.
            IntegrityError: The log is damaged; nothing was written.

        If killed: it is unpinned or not.
        """
        return self._catalog.unpin(self._named(checkpoint).seq, holder=holder) is not None

    def rollback(self, to: Checkpoint | str, *, note: str = "") -> list[int]:
        """Make `to` the latest: everything selectable above it is set aside as abandoned, and nothing is deleted.

        Args:
            to: Which one, or what `get` finds it by: its name, or `name@seq`.
            note: Why; it is recorded.

        Returns:
            The slots that were set aside. `restore` undoes it, one by one.

        Raises:
            NotFoundError: There is none, or it is retired meanwhile. UncommittedError: it was never committed.
            InvalidInputError: It is set aside itself, or the note is too long.
            CommitUnknownError: Whether the run went back is not known; ask again.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: It was not done within the deadline. AccessDeniedError: the store refused.
            IntegrityError: The log is damaged; nothing was written.

        If killed: all of them are set aside or none.
        """
        entry = self._catalog.rollback(self._named(to).seq, note=note)
        return list(entry.record.seqs) if entry is not None and isinstance(entry.record, SetAside) else []

    def set_aside(self, checkpoint: Checkpoint | str, *, reason: Reason, note: str = "") -> bool:
        """Make a checkpoint not selectable by default, and delete nothing; False if it is set aside so already.

        Args:
            checkpoint: Which one, or what `get` finds it by: its name, or `name@seq`.
            reason: `quarantined`, because it is damaged, or `abandoned`, because the run went back.
            note: What was seen; it is recorded.

        Raises:
            NotFoundError: There is none, or it is retired meanwhile. UncommittedError: it was never committed.
            InvalidInputError: There is no such reason, or the note is too long.
            CommitUnknownError: Whether it is set aside is not known; ask again.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: It was not done within the deadline. AccessDeniedError: the store refused.
            IntegrityError: The log is damaged; nothing was written.

        If killed: it is set aside or not.
        """
        return self._catalog.set_aside([self._named(checkpoint).seq], reason=reason, note=note) is not None

    def restore(self, checkpoint: Checkpoint | str) -> bool:
        """Make a checkpoint selectable again, whyever it was set aside; False if it is.

        Args:
            checkpoint: Which one, or `name@seq`: a name alone means one that is not set aside.

        Raises:
            NotFoundError: There is none, or it is retired meanwhile. UncommittedError: it was never committed.
            CommitUnknownError: Whether it is restored is not known; ask again.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: It was not done within the deadline. AccessDeniedError: the store refused.
            IntegrityError: The log is damaged; nothing was written.

        If killed: it is restored or not.
        """
        return self._catalog.restore([self._named(checkpoint).seq]) is not None

    def prove(self, checkpoint: Checkpoint | str, *, verdict: str) -> bool:
        """Record that a resume from a checkpoint went on as the run did; False if this verdict is recorded already.

        Args:
            checkpoint: Which one, or what `get` finds it by: its name, or `name@seq`.
            verdict: What was compared, in a line. The last one is shown.

        Raises:
            InvalidInputError: `verdict` is no text, empty or too long.
            NotFoundError: There is none, or it is retired meanwhile. UncommittedError: it was never committed.
            CommitUnknownError: Whether it is recorded is not known; ask again.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: It was not done within the deadline. AccessDeniedError: the store refused.
            IntegrityError: The log is damaged; nothing was written.

        If killed: it is recorded or not.
        """
        return self._catalog.prove(self._named(checkpoint).seq, verdict=verdict) is not None

    def write_trace(
        self, checkpoint: Checkpoint | str, trace: Mapping[str, object], *, deadline_seconds: float | None = None
    ) -> None:
        """Store what the run did right after a checkpoint, once: what a resume from it is compared with.

        Args:
            checkpoint: Which one. Only the job that wrote it knows what came after.
            trace: JSON of at most 1 MiB.
            deadline_seconds: How long it is tried; by default as long as an append to the log is.

        Raises:
            InvalidInputError: The trace is no JSON, or too long.
            NotFoundError: There is none, or it is retired meanwhile. UncommittedError: it was never committed.
            ConflictError: It has another trace, which stays.
            OutcomeUnknownError: Whether it was stored is not known; try again with the same trace.
            UnsupportedError: A newer version wrote to the log, or the store cannot be written to safely.
            UnavailableError: It was not stored. AccessDeniedError: the store refused.
            IntegrityError: The log is damaged; nothing was written.

        If killed: the whole trace is there or none. The checkpoint is the same.
        """
        write_trace(self._log, self._named(checkpoint).committed, trace, deadline_seconds=deadline_seconds)

    def _named(self, checkpoint: Checkpoint | str) -> Checkpoint:
        return checkpoint if isinstance(checkpoint, Checkpoint) else self.get(checkpoint)

    def _checkpoint(self, committed: Committed) -> Checkpoint:
        return Checkpoint(self._log, committed, self._transfer)
