"""What is in a run: looking up, pinning, setting aside, going back."""

from __future__ import annotations

import numbers
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ckptstore.errors import InvalidInputError, NotFoundError, ResumeError, UncommittedError
from ckptstore.format.layout import DATA_PREFIX, LANES, Stem, encode_name, lane_prefix, parse_data_key
from ckptstore.format.records import ABANDONED, QUARANTINED, Known, Pin, Proved, Restore, SetAside, Unpin
from ckptstore.nearest import meant
from ckptstore.objectstore.port import ObjectInfo, ObjectStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.claim import check_who
from ckptstore.protocol.fold import Committed, Fold
from ckptstore.protocol.log import Entry, RunLog
from ckptstore.protocol.shares import Share
from ckptstore.protocol.verify import ALL, Level, Progress, Verdict, unwatched, verify, verify_kept

Reason = Literal["quarantined", "abandoned"]

MAX_SHOWN = 8
RETIREMENTS = "Run `ckptstore log URL`: it shows the retirement, and why."

_EXACT = re.compile(r"(.+)@([0-9]{1,18})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Uncommitted:
    """An attempt that has data and no commit.

    Args:
        stem: Names it.
        state: `in progress`: its commit may still come; `dead`: it never will (I7).
        objects: How many it has.
        bytes: Of them together.
        modified: When the newest was stored, by the store's clock, in seconds since 1970, or None.
    """

    stem: Stem
    state: Literal["in progress", "dead"]
    objects: int
    bytes: int
    modified: float | None


class Catalog:
    """The checkpoints of an open log. Every question reads first what was appended since.

    Args:
        log: Opened or created.
    """

    def __init__(self, log: RunLog) -> None:
        self.log = log

    def latest(self) -> Committed | None:
        """Return the newest selectable checkpoint: the highest seq, not the highest step (I11).

        Returns:
            None if nothing was ever committed: a fresh start.

        Raises:
            ResumeError: There are commits, and none may be selected; they are listed with the reasons.
            IntegrityError: The log is damaged, or was lost.
            UnsupportedError: A later release wrote to this log.
        """
        fold = self.log.read().whole()
        if fold.newest is not None or not fold.ever_committed:
            return fold.newest
        why = [f"{each.exact_name} ({each.set_aside})" for each in fold.kept]
        shown = ", ".join(why[-MAX_SHOWN:]) or "all are retired"
        raise ResumeError(
            f"Of {fold.ever_committed} commits none may be selected: {shown}.",
            hint="Run `ckptstore ls URL --all`; name one exactly as NAME@SEQ to load it all the same.",
            set_aside=why,
        )

    def find(self, checkpoint_id: str | None = None, *, step: int | None = None, seq: int | None = None) -> Committed:
        """Return one checkpoint: by name or step the highest selectable seq, by `name@seq` or seq exactly that one.

        Raises:
            InvalidInputError: Not exactly one of the three was given.
            NotFoundError: There is none; names and steps near it are listed.
            UncommittedError: Only attempts of this name exist that were never committed.
            IntegrityError: The log is damaged, or was lost.
            UnsupportedError: A later release wrote to this log, and the answer may depend on it.
        """
        check_asked(checkpoint_id, step, seq)
        if (checkpoint_id, step, seq) == (None, None, None):
            raise InvalidInputError("Give exactly one of checkpoint_id, step and seq.", hint="Pass checkpoint_id=...")
        fold = self.log.read()
        if seq is not None:
            return _at(fold, seq, None)
        if checkpoint_id is not None and (exact := _EXACT.fullmatch(checkpoint_id)):
            return _at(fold, int(exact[2]), exact[1])
        wanted = f"step {step}" if checkpoint_id is None else repr(checkpoint_id)
        named = [
            each
            for each in fold.whole().kept
            if (
                each.commit.global_step == step if checkpoint_id is None else each.commit.checkpoint_id == checkpoint_id
            )
        ]
        selectable = [each for each in named if each.set_aside is None]
        if selectable:
            return selectable[-1]
        if named:
            exactly = [f"{each.exact_name} ({each.set_aside})" for each in named]
            raise NotFoundError(
                f"All checkpoints of {wanted} are set aside: {', '.join(exactly[-MAX_SHOWN:])}.",
                hint="Name one exactly, as NAME@SEQ; `ckptstore restore URL NAME@SEQ` makes it selectable again.",
                set_aside=exactly,
            )
        if checkpoint_id is not None:
            _refuse_retired(fold, checkpoint_id)
            self._refuse_uncommitted(fold, checkpoint_id)
        raise NotFoundError(
            f"There is no committed checkpoint {wanted} at {self.log.store.url}.{_near(fold, checkpoint_id)}",
            hint="Run `ckptstore ls URL`; `ckptstore log URL` shows what was retired, too.",
        )

    def checkpoints(self, *, include_set_aside: bool = False) -> list[Committed]:
        """Return the selectable checkpoints by seq, or all that are kept.

        Raises:
            IntegrityError: The log is damaged, or was lost.
            UnsupportedError: A later release wrote to this log.
        """
        fold = self.log.read().whole()
        return fold.kept if include_set_aside else fold.selectable

    def verify(
        self,
        committed: Committed | None = None,
        *,
        level: Level | None = None,
        options: TransferOptions | None = None,
        progress: Progress = unwatched,
        share: Share = ALL,
    ) -> Verdict:
        """Verify the log, and a checkpoint as far as `level` says: by default `full`. See `verify.verify`."""
        self.log.read()
        level = level or ("chain" if committed is None else "full")
        return verify(self.log, committed, level, options or TransferOptions(), progress, share=share)

    def verify_kept(
        self,
        *,
        level: Level = "full",
        options: TransferOptions | None = None,
        progress: Progress = unwatched,
        share: Share = ALL,
    ) -> Iterator[Verdict]:
        """Verify the log, then all that is kept. See `verify.verify_kept`."""
        self.log.read()
        return verify_kept(self.log, level, options or TransferOptions(), progress, share=share)

    def in_progress(self) -> list[Uncommitted]:
        """Return the attempts that have data and no commit, by term and number. Lists all of `data/`."""
        fold = self.log.read().whole()
        return _uncommitted(fold, self.log.store, (DATA_PREFIX,), None)

    def passed_over(self, chosen: Committed) -> list[tuple[str, str]]:
        """Return what is newer than `chosen` and may not be loaded: names and reasons. Lists all of `data/`."""
        attempts = self.in_progress()
        aside = [each for each in self.log.fold.kept if each.seq > chosen.seq and each.set_aside is not None]
        newest = (chosen.commit.term, chosen.commit.attempt)
        return [(each.exact_name, f"set aside: {each.set_aside}") for each in aside] + [
            (each.stem.name, f"never committed, {each.state}: {each.objects} objects")
            for each in attempts
            if (each.stem.term, each.stem.attempt) > newest
        ]

    def pin(self, seq: int, *, holder: str, reason: str) -> Entry | None:
        """Keep a checkpoint from being retired while `holder` holds it; None if it is pinned so already.

        Raises:
            InvalidInputError: The holder is no text, or empty.
            NotFoundError: It is not a kept checkpoint.
            CommitUnknownError: Whether it is pinned is not known. See `RunLog.append` for the rest.

        If killed: it is pinned or not.
        """
        check_who(holder=holder)
        pin = Pin(seq, holder, reason)

        def decide(fold: Fold) -> Pin | None:
            held = {each.holder: each.reason for each in _at(fold, seq, None).pins}
            return None if held.get(holder) == reason else pin

        return self._append(decide)

    def unpin(self, seq: int, *, holder: str) -> Entry | None:
        """Let go of a checkpoint; None if `holder` does not hold it.

        Raises:
            InvalidInputError: The holder is no text, or empty.
            NotFoundError: It is not a kept checkpoint.
            CommitUnknownError: Whether it is unpinned is not known. See `RunLog.append` for the rest.

        If killed: it is unpinned or not.
        """
        check_who(holder=holder)

        def decide(fold: Fold) -> Unpin | None:
            return Unpin(seq, holder) if holder in [pin.holder for pin in _at(fold, seq, None).pins] else None

        return self._append(decide)

    def prove(self, seq: int, *, verdict: str) -> Entry | None:
        """Record that a resume from a checkpoint went on as the run did; None if this verdict is recorded already.

        Raises:
            InvalidInputError: The verdict is no text, empty or too long.
            NotFoundError: It is not a kept checkpoint.
            CommitUnknownError: Whether it is recorded is not known. See `RunLog.append` for the rest.

        If killed: it is recorded or not.
        """
        check_who(verdict=verdict)

        def decide(fold: Fold) -> Proved | None:
            return None if _at(fold, seq, None).proved == verdict else Proved(seq, verdict)

        return self._append(decide)

    def set_aside(self, seqs: Iterable[int], *, reason: Reason, note: str = "") -> Entry | None:
        """Make checkpoints not selectable by default; nothing is deleted. None if they are set aside so already.

        Raises:
            InvalidInputError: There is no such reason, or the note is too long.
            NotFoundError: One is not a kept checkpoint.
            CommitUnknownError: Whether they are set aside is not known. See `RunLog.append` for the rest.

        If killed: all of them are set aside or none.
        """
        if reason not in (QUARANTINED, ABANDONED):
            raise InvalidInputError(
                f"{reason!r:.80} is no reason to set a checkpoint aside.",
                hint=f"Use {QUARANTINED!r} (it is damaged) or {ABANDONED!r} (the run went back).",
            )
        wanted = sorted(set(seqs))
        enough = {QUARANTINED} if reason == QUARANTINED else {QUARANTINED, ABANDONED}

        def decide(fold: Fold) -> SetAside | None:
            left = tuple(seq for seq in wanted if _at(fold, seq, None).set_aside not in enough)
            return SetAside(left, reason, note) if left else None

        return self._append(decide)

    def restore(self, seqs: Iterable[int]) -> Entry | None:
        """Make checkpoints selectable again; None if they are.

        Raises:
            NotFoundError: One is not a kept checkpoint.
            CommitUnknownError: Whether they are restored is not known. See `RunLog.append` for the rest.

        If killed: all of them are restored or none.
        """
        wanted = sorted(set(seqs))

        def decide(fold: Fold) -> Restore | None:
            left = tuple(seq for seq in wanted if _at(fold, seq, None).set_aside is not None)
            return Restore(left) if left else None

        return self._append(decide)

    def rollback(self, to: int, *, note: str = "") -> Entry | None:
        """Abandon everything selectable above the checkpoint `to`, so that it is the latest; None if it is already.

        A crash after it does not undo it. A running process that goes on from `to` begins a new incarnation.

        Raises:
            NotFoundError: `to` is not a kept checkpoint.
            InvalidInputError: `to` is set aside itself.
            CommitUnknownError: Whether the run went back is not known. See `RunLog.append` for the rest.

        If killed: all of them are abandoned or none.
        """

        def decide(fold: Fold) -> SetAside | None:
            target = _at(fold, to, None)
            if target.set_aside is not None:
                raise InvalidInputError(
                    f"{target.exact_name} is set aside itself ({target.set_aside}).",
                    hint=f"Run `ckptstore restore URL {target.exact_name}` first, or go back to another one.",
                    seq=to,
                )
            above = tuple(each.seq for each in fold.selectable if each.seq > to)
            return SetAside(above, ABANDONED, note) if above else None

        return self._append(decide)

    def _append(self, decide: Callable[[Fold], Known | None]) -> Entry | None:
        self.log.read()
        return self.log.append(decide)

    def _refuse_uncommitted(self, fold: Fold, name: str) -> None:
        encoded = encode_name(name)
        prefixes = [lane_prefix(lane) for lane in range(LANES)]
        attempts = _uncommitted(fold, self.log.store, prefixes, f"{encoded}.t")
        attempts = [each for each in attempts if each.stem.name == name]
        if attempts:
            shown = [f"{each.stem} ({each.state}, {each.objects} objects)" for each in attempts]
            raise UncommittedError(
                f"{name!r} was never committed; there is data of {', '.join(shown[-MAX_SHOWN:])}. "
                "Uncommitted data is never loaded.",
                hint="Load another checkpoint; `ckptstore ls URL` lists what is committed.",
                attempts=shown,
            )


def check_asked(checkpoint_id: object, step: object, seq: object) -> None:
    """Check that at most one of three ways to ask for a checkpoint is used, and that it asks for something.

    Raises:
        InvalidInputError: Several are used, the name is no text, or a number is no whole number.
    """
    asked = {"checkpoint_id": checkpoint_id, "step": step, "seq": seq}
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) > 1:
        shown = ", ".join(f"{name}={value!r:.80}" for name, value in given.items())
        raise InvalidInputError(
            f"Give one of checkpoint_id, step and seq, not {shown}.", hint="Leave out all but one.", given=list(given)
        )
    if checkpoint_id is not None and not isinstance(checkpoint_id, str):
        encode_name(checkpoint_id)  # type: ignore[arg-type]  # which refuses it
    for name in given.keys() - {"checkpoint_id"}:
        if isinstance(given[name], bool) or not isinstance(given[name], numbers.Integral):
            raise InvalidInputError(
                f"{name} must be a whole number, not {given[name]!r:.80}.",
                hint=f"Pass {name}=12000, say.",
                given=[name],
            )


def _uncommitted(fold: Fold, store: ObjectStore, prefixes: Iterable[str], start: str | None) -> list[Uncommitted]:
    """Return attempts without a commit under `prefixes`; only those whose key goes on with `start`, if given."""
    infos: dict[Stem, list[ObjectInfo]] = defaultdict(list)
    for prefix in prefixes:
        for info in store.list(prefix, after=prefix + start if start else None):
            if start and not info.key.startswith(prefix + start):
                break
            if (parsed := parse_data_key(info.key)) is not None:  # what does not parse is foreign
                infos[parsed.stem].append(info)
    committed = {each.commit.prefix for each in fold.kept} | set(fold.retired.values())
    found = []
    for stem in sorted(infos, key=lambda stem: (stem.term, stem.attempt, str(stem))):
        if str(stem) not in committed:
            times = [info.modified for info in infos[stem] if info.modified is not None]
            sizes = [info.size for info in infos[stem]]
            state: Literal["in progress", "dead"] = "dead" if is_orphan(fold, stem) else "in progress"
            found.append(Uncommitted(stem, state, len(sizes), sum(sizes), max(times, default=None)))
    return found


def is_orphan(fold: Fold, stem: Stem) -> bool:
    """Say whether an attempt without a commit can never commit (I7).

    It is of a fenced term, or a later attempt of its term has committed.
    """
    return fold.fences(stem.term) or (stem.term == fold.term and fold.supersedes(stem.attempt))


def _at(fold: Fold, seq: int, name: str | None) -> Committed:
    """Return the kept checkpoint of slot `seq`, which must have this name if one is given."""
    found = fold.commits.get(seq)
    if found is not None and name in (None, found.commit.checkpoint_id):
        return found
    gone, hint = _retired_name(fold, seq), RETIREMENTS
    if found is not None:
        what, hint = f"Slot {seq} holds {found.commit.checkpoint_id!r}, not {name!r}.", "Run `ckptstore ls URL --all`."
    elif gone is not None and name not in (None, gone):
        what = f"Slot {seq} holds {gone!r}, not {name!r}, and it is retired."
    elif gone is not None:
        what = f"{gone}@{seq} is retired."
    elif seq >= fold.whole().end:
        what, hint = (
            f"There is no slot {seq} yet: the log ends before slot {fold.end}.",
            "Run `ckptstore ls URL --all`.",
        )
    else:
        what = (
            f"Slot {seq} holds no checkpoint that is kept: it was retired and collected, or nothing was ever committed "
            "there."
        )
    raise NotFoundError(what, hint=hint, seq=seq)


def _retired_name(fold: Fold, seq: int) -> str | None:
    """Return the name of a checkpoint that is retired and not collected yet; None of any other slot."""
    stem = Stem.parse(fold.retired.get(seq, ""))
    return None if stem is None else stem.name


def _refuse_retired(fold: Fold, name: str) -> None:
    seqs = [seq for seq in sorted(fold.retired) if _retired_name(fold, seq) == name]
    if seqs:
        exactly = [f"{name}@{seq}" for seq in seqs]
        raise NotFoundError(
            f"{name!r} is retired: {', '.join(exactly[-MAX_SHOWN:])}.", hint=RETIREMENTS, retired=exactly
        )


def _near(fold: Fold, name: str | None) -> str:
    """Return a sentence with what there is, the nearest names first."""
    names = list(dict.fromkeys(each.commit.checkpoint_id for each in reversed(fold.selectable)))
    if not names:
        return " Nothing is committed."
    suggestion = meant(name, names) if name else ""
    return suggestion or f" There are: {', '.join(names[:MAX_SHOWN])}."
