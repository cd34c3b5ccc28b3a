"""Scrubbing: verdicts that are sure, and what follows from them: a quarantine, a record, what a restore would lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from ckptstore.errors import InvalidInputError, NotFoundError
from ckptstore.events import DamageFound, tell
from ckptstore.format.records import LEVELS, Verified
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.capable import check_signs
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.fold import Committed, Fold
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.lost import check_may_append
from ckptstore.protocol.shares import Share
from ckptstore.protocol.verify import ALL, Level, Progress, Verdict, unwatched, verify, verify_kept, without_retired
from ckptstore.protocol.verify_data import verify_data
from ckptstore.units import counted

MAX_NOTE_CHARACTERS = 800
MAX_NOTED = 3


@dataclass(frozen=True, slots=True)
class Loss:
    """What a resume loses because the newest checkpoint is damaged.

    Args:
        newest: What would be selected, and is damaged.
        instead: The newest older one in which nothing was found; None if there is none.
        complete: All objects of `instead` were judged, and not a share of them.
        steps: Between the two, where both say their step.
        seconds: Between their commits, by the trainers' clocks.
    """

    newest: Committed
    instead: Committed | None
    complete: bool = False
    steps: int | None = None
    seconds: float | None = None


class Scrub:
    """One pass over a run's objects, or over a share of them.

    Args:
        log: Open.
        options: How bytes are moved: `fetches_in_flight` threads, `transfer_bytes` of memory.
        again: Opens the same place with a client of its own, for second readings.
        share: Which objects. The log counts as one.
    """

    def __init__(
        self, log: RunLog, *, options: TransferOptions, again: Callable[[], ObjectStore], share: Share = ALL
    ) -> None:
        self._log, self._options, self._again, self.share = log, options, again, share
        self._before = log.fold.selectable
        self._known: dict[int, Verdict] = {}
        self._told: set[str] = set()

    def verify(self, committed: Committed | None, *, level: Level, progress: Progress = unwatched) -> Verdict:
        """Return a verdict on the log and one checkpoint. See `protocol.verify.verify`; damage is read twice."""
        self._log.read()
        return self._sure(verify(self._log, committed, level, self._options, progress, share=self.share))

    def verify_kept(self, *, level: Level, progress: Progress = unwatched) -> Iterator[Verdict]:
        """Return verdicts on the log and on all that is kept. See `protocol.verify.verify_kept`."""
        self._log.read()
        return map(self._sure, verify_kept(self._log, level, self._options, progress, share=self.share))

    def check_may_note(self) -> None:
        """Check, before anything is read, that `quarantine` and `record` may append, and can sign if they must.

        Raises:
            InvalidInputError: There is no key to sign with.
            IntegrityError: The log was removed since it was read, or lost its tail; see `RunLog.append`.
            CkptStoreError: The store could not be read.
        """
        if self._log.run is not None:
            check_may_append(self._log)
            check_signs(self._log.check_tail(), self._log.fold, self._log.options.signing)

    def quarantine(self, verdict: Verdict) -> bool:
        """Set a checkpoint aside in which damage was read twice; False if nothing is to be done.

        What the store only calls rewritten is no damage, and what was read once may have been damaged on its way. The
        note says what was seen.

        Raises:
            NotFoundError: It is retired meanwhile.
            CommitUnknownError: Whether it is set aside is not known. See `RunLog.append` for the rest.

        If killed: it is set aside or not.
        """
        confirmed = [each for each in verdict.findings if each.confirmed and each.is_damage]
        if not confirmed or verdict.seq is None:
            return False
        shown = "; ".join(f"{each.kind}: {each.message}" for each in confirmed[:MAX_NOTED])
        more = f"; {len(confirmed) - MAX_NOTED} more" if len(confirmed) > MAX_NOTED else ""
        what = f"level {verdict.level}, {counted(len(confirmed), 'object')} damaged, read twice"
        note = f"{what}: {shown[:MAX_NOTE_CHARACTERS]}{more}"
        return Catalog(self._log).set_aside([verdict.seq], reason="quarantined", note=note) is not None

    def record(self, verdict: Verdict) -> bool:
        """Record that a whole checkpoint passed; False if this level or a stronger one is recorded already.

        Raises:
            InvalidInputError: Something was found, or not all objects of a checkpoint were judged.
            NotFoundError: It is retired meanwhile.
            CommitUnknownError: Whether it is recorded is not known. See `RunLog.append` for the rest.

        If killed: it is recorded or not.
        """
        seq, level = verdict.seq, verdict.level
        if seq is None or not verdict.passed or level == "chain":
            raise InvalidInputError(
                "Only a checkpoint that passed whole, at level exists or above, is recorded as verified.",
                hint="Verify all of its objects: `ckptstore verify URL --level full --record`.",
            )

        def decide(fold: Fold) -> Verified | None:
            committed = fold.commits.get(seq)
            if committed is None:
                raise NotFoundError(f"The checkpoint of slot {seq} is retired.", seq=seq)
            known = -1 if committed.verified is None else LEVELS.index(committed.verified)
            return None if known >= LEVELS.index(level) else Verified(seq, level)

        self._log.refresh()
        return self._log.append(decide) is not None

    def loss(self, *, level: Level, progress: Progress = unwatched) -> Loss | None:
        """Return what a resume loses, or None if this pass did not find the newest checkpoint damaged.

        Of what was selectable when the pass began. Older ones without a verdict get one, until nothing is found.

        Raises:
            CkptStoreError: The store could not be read.
        """

        def judged(committed: Committed) -> Verdict:
            return self._known.get(committed.seq) or self.verify(committed, level=level, progress=progress)

        return loss_of(self._before, self._known, judged)

    def _sure(self, verdict: Verdict) -> Verdict:
        """Read what was found damaged once more, over connections of its own, and mark what is found again.

        So a bit that flipped on the way, in a cache or in this machine, is not taken for one that flipped in the store.
        """
        committed = None if verdict.seq is None else self._log.fold.commits.get(verdict.seq)
        if committed is None:
            return verdict
        doubtful = {each.key for each in verdict.findings if each.is_damage and each.level != "chain"}
        if doubtful:
            level: Level = "full" if verdict.level == "full" else "exists"
            second = verify_data(self._again(), committed, level, options=self._options, wanted=doubtful.__contains__)
            found = {each.key for each in second.findings if each.is_damage}
            marked = tuple(replace(each, confirmed=each.is_damage and each.key in found) for each in verdict.findings)
            verdict = without_retired(self._log, replace(verdict, findings=marked))
            self._tell(verdict)
        self._known[committed.seq] = verdict
        return verdict

    def _tell(self, verdict: Verdict) -> None:
        """Tell of each object that was damaged in two readings, once."""
        for key in sorted({each.key for each in verdict.findings if each.confirmed} - self._told):
            self._told.add(key)
            tell(self._log.observer, DamageFound(key))


def loss_of(
    selectable: Sequence[Committed], known: Mapping[int, Verdict], judged: Callable[[Committed], Verdict]
) -> Loss | None:
    """Return what a resume loses if the last of `selectable` is known to be damaged.

    Args:
        selectable: By seq.
        known: Verdicts by seq.
        judged: Returns the verdict on an older one. It is asked until nothing is found.
    """
    newest = selectable[-1] if selectable else None
    if newest is None or newest.seq not in known or not _is_damaged(known[newest.seq]):
        return None
    for committed in reversed(selectable[:-1]):
        verdict = judged(committed)
        if not _is_damaged(verdict) and not verdict.retired:
            return Loss(newest, committed, verdict.complete, _steps(newest, committed), _seconds(newest, committed))
    return Loss(newest, None)


def _is_damaged(verdict: Verdict) -> bool:
    return any(each.is_damage and each.level != "chain" for each in verdict.findings)


def _steps(newest: Committed, instead: Committed) -> int | None:
    steps = newest.commit.global_step, instead.commit.global_step
    return None if steps[0] is None or steps[1] is None else steps[0] - steps[1]


def _seconds(newest: Committed, instead: Committed) -> float | None:
    try:
        return (datetime.fromisoformat(newest.written_at) - datetime.fromisoformat(instead.written_at)).total_seconds()
    except (ValueError, TypeError):  # for people; another tool may have written it otherwise
        return None
