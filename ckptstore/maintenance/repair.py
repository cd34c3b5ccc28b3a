"""Repair: what can be made again from what the log and the objects prove, and nothing that has to be guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptstore.errors import CkptStoreError, NotFoundError
from ckptstore.events import DamageFound, tell
from ckptstore.format.records import ABANDONED, QUARANTINED, Restore, SetAside
from ckptstore.maintenance import hints, rebuild, replica
from ckptstore.maintenance.hints import Hint
from ckptstore.maintenance.rebuild import Copy, LeftOut
from ckptstore.maintenance.scrub import Scrub
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import Entry, RunLog
from ckptstore.protocol.verify import Progress, Verdict, folded, unwatched
from ckptstore.protocol.verify_data import verify_data


@dataclass(frozen=True, slots=True)
class Mend:
    """An object that is damaged or absent, and what became of it.

    Args:
        seq: Of its checkpoint.
        key: The object.
        size: In bytes, if it is known.
        why: What was found.
        outcome: `can be mended`, `mended`, or `cannot be mended`.
        reason: Why it cannot be.
    """

    seq: int
    key: str
    size: int | None
    why: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Rebuilding:
    """What a new log would hold.

    Args:
        run: Identity of the run.
        found: Copies of commits whose bytes are all there, in their order.
        left_out: Copies that bring nothing back, and why.
    """

    run: str
    found: tuple[Copy, ...]
    left_out: tuple[LeftOut, ...]


class Repair:
    """What an operator may do for a run that was damaged. Methods named for what they return change nothing.

    Args:
        log: Open.
        options: How bytes are moved.
        again: Opens the same place with a client of its own: what was stored is read back through it.
    """

    def __init__(self, log: RunLog, *, options: TransferOptions, again: Callable[[], ObjectStore]) -> None:
        self._log, self._options, self._again = log, options, again
        self._scrub = Scrub(log, options=options, again=again)

    def stale_hints(self) -> list[Hint]:
        """Return the hints that are missing or stale. See `hints.stale_hints`."""
        return [*hints.stale_hints(self._log)]

    def write_hints(self, stale: Sequence[Hint]) -> None:
        """Write hints as they ought to be. If killed: some are new, the others as they were."""
        hints.write_hints(self._log.store, stale)

    def check_replica(self, source: ObjectStore) -> None:
        """Check that a store is a replica of this run.

        Raises:
            NotFoundError: There is no run. InvalidInputError: it is another one.
            CkptStoreError: It could not be read.
        """
        fold = self._log.fold
        replica.check_replica(source, run=fold.run, run_blake3=fold.run_blake3)

    def verdict(self, committed: Committed, *, progress: Progress = unwatched) -> Verdict:
        """Return what level `full` says of a checkpoint; what it finds is read twice."""
        return self._scrub.verify(committed, level="full", progress=progress)

    def mends(self, committed: Committed, verdict: Verdict, source: ObjectStore | None) -> Iterator[Mend]:
        """Yield what a replica could mend of what `verdict` found damaged twice. It is read and hashed for that.

        Without a `source` nothing can be mended.

        Raises:
            CkptStoreError: The run's own store could not be read.
        """
        named = {each.key: each for each in replica.named_objects(self._log.store, committed)}
        for finding in verdict.findings:
            if not finding.is_damage or finding.level == "chain":
                continue
            mend = Mend(committed.seq, finding.key, None, finding.message, "cannot be mended")
            if not finding.confirmed:
                yield replace(mend, reason="A second reading found it whole.")
            elif finding.key not in named:
                yield replace(mend, reason="What it was is told by an object that is damaged itself.")
            elif source is None:
                yield replace(mend, reason="No replica was named.")
            else:
                mend = replace(mend, size=named[finding.key].size)
                try:
                    replica.check_offer(source, named[finding.key], options=self._options)
                    yield replace(mend, outcome="can be mended")
                except CkptStoreError as error:
                    yield replace(mend, reason=f"The replica does not have it: {error.message}")

    def mend(
        self, committed: Committed, source: ObjectStore | None, *, progress: Progress = unwatched
    ) -> tuple[list[Mend], Verdict]:
        """Mend what can be, parts first, since they name the others.

        Returns:
            What became of each object, and the verdict of level `full` on what is there now.

        Raises:
            NotFoundError: The checkpoint was retired meanwhile: its bytes are nobody's any more.
            CkptStoreError: The run's own store could not be read.

        If killed: each object as it was, or the right one.
        """
        done: dict[str, Mend] = {}
        while True:
            verdict = self.verdict(committed, progress=progress)
            found = [each for each in self.mends(committed, verdict, source) if each.key not in done]
            ended = [self._mended(committed, each, source) for each in found]
            done.update({each.key: each for each in ended})
            if not any(each.outcome == "mended" for each in ended):
                return [*done.values()], verdict

    def _mended(self, committed: Committed, wanted: Mend, source: ObjectStore | None) -> Mend:
        if wanted.outcome != "can be mended" or source is None:
            return wanted
        if not self.is_kept(committed):
            raise NotFoundError(f"The checkpoint of slot {committed.seq} is retired.", seq=committed.seq)
        named = {each.key: each for each in replica.named_objects(self._log.store, committed)}
        try:
            replica.mend(self._log.store, source, named[wanted.key], again=self._again(), options=self._options)
        except CkptStoreError as error:
            return replace(wanted, outcome="cannot be mended", reason=error.message)
        return replace(wanted, outcome="mended")

    def is_kept(self, committed: Committed) -> bool:
        """Say whether a checkpoint is not retired by now.

        Raises:
            CkptStoreError: The log could not be read.
        """
        return committed.seq in self._log.refresh().whole().commits

    def may_be_restored(self, committed: Committed) -> bool:
        """Say whether a checkpoint is set aside for its damage alone, and not because the run went back as well.

        Raises:
            CkptStoreError: The log could not be read.
        """
        now = self._log.refresh().commits.get(committed.seq)
        if now is None or now.set_aside != QUARANTINED:
            return False
        abandoned = False
        for entry in self._valid_records():
            if isinstance(entry.record, SetAside | Restore) and committed.seq in entry.record.seqs:
                went_back = isinstance(entry.record, SetAside) and entry.record.reason == ABANDONED
                abandoned = went_back or (abandoned and isinstance(entry.record, SetAside))
        return not abandoned

    def _valid_records(self) -> Iterator[Entry]:
        """Yield the records that counted at their slots. Which did, a snapshot does not say: all are folded."""
        for entry, fold in folded(self._log, end=self._log.fold.end):
            if not fold.ignored or fold.ignored[-1].seq != entry.seq:
                yield entry

    def check_may_restore(self) -> None:
        """Check, before anything is read, that a restoration can be signed if it must be: see `Scrub`."""
        self._scrub.check_may_note()

    def restore(self, committed: Committed) -> bool:
        """Make a checkpoint selectable again. See `Catalog.restore`. If killed: it is restored or not."""
        return Catalog(self._log).restore([committed.seq]) is not None

    def rebuilding(self) -> Rebuilding:
        """Return what a new log would hold: every byte of the checkpoints in it is read and hashed.

        Raises:
            InvalidInputError: There is a log, or the copies make none.
            CkptStoreError: The store could not be read.
        """
        rebuild.check_lost(self._log)
        found: list[Copy] = []
        left_out: list[LeftOut] = []
        for each in rebuild.copies(self._log):
            if isinstance(each, LeftOut):
                left_out.append(each)
            elif (why := self._why_not(each.committed)) is None:
                found.append(each)
            else:
                left_out.append(LeftOut(each.committed.commit.stem.committed_key, why))
        return Rebuilding(rebuild.check_one_run(self._log, found), tuple(found), tuple(left_out))

    def rebuild_log(self, plan: Rebuilding) -> list[str]:
        """Write the log that was planned, then its hints; return the prefixes that are committed in it.

        Raises:
            InvalidInputError: A log was begun meanwhile.
            ConflictError: A job has claimed the run meanwhile.
            CommitUnknownError: Whether a record stands is not known; do it again.

        If killed: a log with the first of the checkpoints; done again, it goes on.
        """
        rebuild.check_lost(self._log)
        log = rebuild.rebuild(self._log, plan.run, plan.found)
        self.write_hints([*hints.stale_hints(log)])
        self._log.refresh()
        self._log.lost_from = None  # what the old hint told of is rebuilt
        return [each.commit.prefix for each in log.fold.kept]

    def _why_not(self, committed: Committed) -> str | None:
        """Return why a checkpoint's bytes are not all there, as two readings say; None if they are."""
        for store in (self._log.store, self._again()):
            verdict = verify_data(store, committed, "full", options=self._options)
            if not any(each.is_damage for each in verdict.findings):
                return None
        for each in verdict.findings:
            tell(self._log.observer, DamageFound(each.key))
        return verdict.findings[0].message
