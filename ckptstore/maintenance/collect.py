"""RETIRE first, then delete: what was planned, and nothing else (I17).

Several may collect at once, and each may be killed at any call: what is retired stays retired, what is deleted stays
deleted, and whoever comes next goes on. A deletion is announced to the audit before it is sent, so that a crash never
leaves one that nobody wrote down; a line for one that was never sent is the price.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

from ckptstore.errors import (
    AccessDeniedError,
    CkptStoreError,
    ConflictError,
    FencedError,
    IntegrityError,
    InvalidInputError,
)
from ckptstore.events import Collected as CollectedEvent
from ckptstore.events import Deleted, tell
from ckptstore.events import Retired as RetiredEvent
from ckptstore.format.layout import Stem, parse_data_key
from ckptstore.format.records import Collected, Retire
from ckptstore.maintenance.collect_plan import (
    GRACE_SECONDS,
    Deletion,
    Plan,
    Ripe,
    certain_fold,
    check_grace,
    keys_under,
    plan_collection,
)
from ckptstore.maintenance.retention import Keep, retirable
from ckptstore.objectstore.port import PendingUpload
from ckptstore.options import TransferOptions
from ckptstore.protocol.capable import check_signs
from ckptstore.protocol.fold import Fold
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.retirement import refusals

SEQS_AT_ONCE = 1000
"""Of one record: it has 64 KiB at most."""
DELETIONS_AT_ONCE = 64
"""Of one call of the audit."""
AGAIN = (
    "Run the same command without what applies it (`ckptstore gc URL` without --apply), and look at the new plan; to "
    "apply it, the --keep-... rules and --grace must be the same as when it was shown."
)

Audit = Callable[[Sequence[Deletion]], None]
"""Told of what is about to be deleted. What it raises ends the collection, before these are."""


def unaudited(deletions: Sequence[Deletion]) -> None:
    """Write nothing down."""


@dataclass(slots=True)
class Report:
    """What a collection did.

    Args:
        plan: What was to be done.
        retired: Checkpoints, by seq.
        deleted: Objects.
        aborted: Uploads.
        collected: Retired checkpoints of which nothing is left, by seq.
        failed: What could not be deleted or aborted, by key, and why. The next collection tries again.
    """

    plan: Plan
    retired: list[int] = field(default_factory=list)
    deleted: list[Deletion] = field(default_factory=list)
    aborted: list[PendingUpload] = field(default_factory=list)
    collected: list[int] = field(default_factory=list)
    failed: dict[str, CkptStoreError] = field(default_factory=dict)

    @property
    def is_denied(self) -> bool:
        """Whether these credentials may not delete."""
        return any(isinstance(error, AccessDeniedError) for error in self.failed.values())


def retire(log: RunLog, seqs: Iterable[int], *, reason: str) -> list[int]:
    """Retire checkpoints, whatever a policy says; return those that were not retired before.

    Args:
        log: Open.
        seqs: Which; at most 1000.
        reason: Why; it is recorded.

    Raises:
        InvalidInputError: They may not be retired: one is pinned, the newest, or the newest verified, or fewer than two
            would be left; or one is no kept checkpoint, the reason is too long, or they are too many. Those that
            may not are named, each with its reason.
        CommitUnknownError: Whether they are retired is not known; ask again. See `RunLog.append` for the rest.

    If killed: all of them are retired or none. Nothing is deleted but the copies of their commits, which are hints.
    """
    wanted = _all_at_once(seqs)

    def decide(fold: Fold) -> Retire | None:
        left = tuple(seq for seq in wanted if seq not in fold.retired)
        _check_allowed(fold, left)
        return Retire(left, reason) if left else None

    log.read()
    return _without_copies(log, _retired(log, decide))


def check_retirable(log: RunLog, seqs: Iterable[int]) -> None:
    """Check that checkpoints may be retired now, before anybody is asked whether they shall be. Nothing is changed.

    Args:
        log: Open.
        seqs: Which. What is retired already may be.

    Raises:
        InvalidInputError: They may not; see `retire`.
        UnsupportedError: A later release wrote to this log.
        CkptStoreError: The log could not be read.
    """
    wanted = _all_at_once(seqs)
    fold = log.read().whole()
    _check_allowed(fold, [seq for seq in wanted if seq not in fold.retired])


def retire_by(
    log: RunLog,
    keep: Keep,
    *,
    shown: Sequence[int] | None = None,
    reason: str = "",
    term: int | None = None,
    go_on: Callable[[], None] = lambda: None,
) -> list[int]:
    """Retire what a policy lets go of; return which.

    Args:
        log: Open.
        keep: The policy.
        shown: Nothing but these, by seq, which somebody has agreed to (I17); None: all.
        reason: Why; by default the policy itself.
        term: Of a trainer, which may not retire after a newer one has claimed the run.
        go_on: Called before the copy of a commit is deleted. What it raises ends this; what is retired stays retired.

    Raises:
        ConflictError: The policy keeps some of what was shown by now.
        FencedError: A newer incarnation has claimed the run.
        CommitUnknownError: Whether they are retired is not known; ask again. See `RunLog.append` for the rest.

    If killed: all of them are retired or none, of each thousand. Nothing is deleted but the copies of their commits.
    """

    def decide(fold: Fold) -> Retire | None:
        if term is not None and fold.fences(term):  # I3
            raise FencedError(f"Term {fold.term} has claimed the run; term {term} retires nothing any more.", term=term)
        left = tuple(retirable(fold, keep))[:SEQS_AT_ONCE]
        return Retire(left, reason or str(keep), term) if left else None

    log.read()
    if shown is not None:
        return _without_copies(log, _retire_as_shown(log, shown, keep, reason), go_on)
    retired: list[int] = []
    while some := _without_copies(log, _retired(log, decide), go_on):
        retired += some
    return retired


def collect(  # noqa: PLR0913  (what was shown, and how it is applied)
    log: RunLog,
    *,
    digest: str,
    keep: Keep | None = None,
    grace_seconds: float = GRACE_SECONDS,
    reason: str = "",
    audit: Audit = unaudited,
    options: TransferOptions | None = None,
) -> Report:
    """Plan again, and apply the plan if it is the one that was shown (I17).

    Args:
        log: Open.
        digest: Of the plan that was shown.
        keep: As it was when it was shown.
        grace_seconds: The same.
        reason: Why; by default the policy itself.
        audit: Told of each deletion before it is sent.
        options: How many deletions are on their way at once.

    Raises:
        InvalidInputError: The digest or the grace is none; or the run is signed, and there is no key to sign with.
            Nothing was changed.
        ConflictError: The plan is not the one that was shown any more. Nothing was changed, or nothing but what that
            plan says: a checkpoint that was to be retired was pinned in that very moment.
        IntegrityError: The log is damaged, or lost its tail. Nothing was deleted.
        CommitUnknownError: Whether what was to be retired is retired is not known. Nothing was deleted.
        UnsupportedError: A later release wrote to this log, or the store cannot be written to safely.
        CkptStoreError: The store could not be read: `UnavailableError`, `AccessDeniedError`, ... What cannot be
            deleted raises nothing: see the report.

    If killed: some of it is done, in this order: retired, deleted, recorded as gone. The next collection goes on.
    """
    if re.fullmatch("[0-9a-f]{64}", digest) is None:
        raise InvalidInputError(
            f"{digest!r:.80} is no digest of a plan.", hint="`ckptstore gc URL` prints it: 64 hexadecimal digits."
        )
    plan = plan_collection(log, keep=keep, grace_seconds=grace_seconds)
    if plan.digest != digest:
        raise _another_plan(digest, plan)
    if plan.retire or plan.gone or log.fold.retired:  # what is deleted is recorded as gone
        check_signs(log.check_tail(), log.fold, log.options.signing)
    report = Report(plan)
    if keep is not None:
        report.retired = _retire_as_shown(log, plan.retire, keep, reason)
    _check_still_garbage(log, plan.delete)
    _delete(log, plan.delete, report, audit=audit, options=options or TransferOptions())
    _abort(log, plan.abort, report)
    prefixes = {parsed.stem for each in plan.delete if (parsed := parse_data_key(each.key)) is not None}
    emptied = {*map(str, prefixes)} - {each.prefix for each in plan.waiting}
    seqs = [seq for seq, prefix in log.fold.retired.items() if prefix in emptied or seq in plan.gone]
    _record_gone(log, seqs, report)
    return report


def collect_retired(
    log: RunLog,
    *,
    now: float | None,
    grace_seconds: float,
    audit: Audit = unaudited,
    options: TransferOptions | None = None,
) -> Report:
    """Delete what is retired long enough, and nothing else: what a trainer does, without a list of all data.

    Args:
        log: Open.
        now: The store's time, or less; None: it is not known.
        grace_seconds: How long ago it must have been retired.
        audit: Told of each deletion before it is sent.
        options: How many deletions are on their way at once; None: one, on this thread, and `audit` hears of each.

    Raises:
        CkptStoreError: See `collect`.

    If killed: see `collect`.
    """
    check_grace(grace_seconds)
    fold = certain_fold(log)
    ripe = Ripe(log, fold, now, grace_seconds)
    due = {seq: prefix for seq, prefix in fold.retired.items() if ripe.retired(seq)}
    found = {seq: keys_under(log.store, prefix) for seq, prefix in due.items()}
    deletions = [Deletion(info.key, info.size, f"{seq} is retired") for seq in sorted(found) for info in found[seq]]
    report = Report(Plan(log.store.url, log.run, delete=tuple(deletions)))
    _check_still_garbage(log, deletions)
    _delete(log, deletions, report, audit=audit, options=options)
    _record_gone(log, sorted(due), report)
    return report


def _all_at_once(seqs: Iterable[int]) -> list[int]:
    wanted = sorted(set(seqs))
    if len(wanted) > SEQS_AT_ONCE:  # all or none: of several records some could be written
        raise InvalidInputError(
            f"{len(wanted)} checkpoints are too many for one record, which holds {SEQS_AT_ONCE}. Nothing was retired.",
            hint=f"Name at most {SEQS_AT_ONCE} at once.",
        )
    return wanted


def _check_allowed(fold: Fold, seqs: Sequence[int]) -> None:
    if not (refused := refusals(fold, seqs)):
        return
    hint = "Leave it out; `ckptstore ls URL --all` shows what there is."
    for each in [each for each in refused if each.holders][:1]:
        name, holder = shlex.quote(each.name), shlex.quote(each.holders[0])
        hint = f"Leave it out; or `ckptstore unpin URL {name} --holder {holder}` lets go of a pin."
    told = " ".join(f"{each.name} cannot be retired: {each.why}." for each in refused)
    raise InvalidInputError(f"{told} Nothing was retired.", hint=hint, seqs=[each.seq for each in refused])


def _retired(log: RunLog, decide: Callable[[Fold], Retire | None]) -> list[int]:
    appended = log.append(decide)
    if appended is None or not isinstance(appended.record, Retire):
        return []
    seqs, reason = appended.record.seqs, appended.record.reason
    tell(log.observer, RetiredEvent(seqs=seqs, reason=reason))
    return list(seqs)


def _without_copies(log: RunLog, seqs: list[int], go_on: Callable[[], None] = lambda: None) -> list[int]:
    """Delete the copies of their commits, best effort: a log that is rebuilt from copies leaves them out.

    They are hints (I10), so nobody needs a grace. Who may not delete leaves them to whoever collects.
    """
    retired = log.fold.retired
    with suppress(CkptStoreError):
        for seq in seqs:
            if seq in retired and (stem := Stem.parse(retired[seq])) is not None:
                go_on()
                log.store.delete(stem.committed_key)
    return seqs


def _retire_as_shown(log: RunLog, shown: Sequence[int], keep: Keep, reason: str) -> list[int]:
    """Retire what was shown; the policy must say so still at the slot where it is written (I17)."""
    retired: list[int] = []
    for first in range(0, len(shown), SEQS_AT_ONCE):
        wanted = shown[first : first + SEQS_AT_ONCE]

        def decide(fold: Fold, wanted: Sequence[int] = wanted) -> Retire | None:
            left = tuple(seq for seq in wanted if seq in fold.commits)  # another collector may have been first
            if spared := sorted({*left} - {*retirable(fold, keep)}):
                names = ", ".join(fold.commits[seq].exact_name for seq in spared)
                raise ConflictError(
                    f"The plan that was shown no longer holds: {names} may not be retired now. Nothing was deleted.",
                    hint=AGAIN,
                    seqs=spared,
                )
            return Retire(left, reason or str(keep)) if left else None

        retired += _retired(log, decide)
    return retired


def _another_plan(digest: str, plan: Plan) -> ConflictError:
    bytes_now = sum(each.size for each in plan.delete)
    return ConflictError(
        f"The plan is not the one that was shown: its digest is {plan.digest}, quoted was {digest}. It would retire "
        f"{len(plan.retire)} checkpoints, delete {len(plan.delete)} objects of {bytes_now} bytes and abort "
        f"{len(plan.abort)} uploads. Nothing was changed.",
        hint=AGAIN,
        quoted=digest,
        planned=plan.digest,
        retire=list(plan.retire),
    )


def _check_still_garbage(log: RunLog, deletions: Sequence[Deletion]) -> None:
    """Read the log once more, right before the first deletion: no kept checkpoint may have any of it (I8).

    Raises:
        IntegrityError: One has: a bug; or the log lost its tail, or was replaced, since the plan was made.
        CkptStoreError: The log could not be read.
    """
    if not deletions:
        return
    kept = {each.commit.prefix for each in certain_fold(log).kept}
    for each in deletions:
        parsed = parse_data_key(each.key)
        if parsed is None or str(parsed.stem) in kept:
            raise IntegrityError(f"{each.key} is of a kept checkpoint. Nothing was deleted.", key=each.key)


def _delete(
    log: RunLog, deletions: Sequence[Deletion], report: Report, *, audit: Audit, options: TransferOptions | None
) -> None:
    def delete(each: Deletion) -> CkptStoreError | None:
        try:
            log.store.delete(each.key)
        except CkptStoreError as error:
            return error
        return None

    # A pool's threads are waited for when the process ends, however long a store hangs: a trainer has none.
    pool = None if options is None else ThreadPoolExecutor(options.fetches_in_flight, "ckptstore-collect")
    at_once, each_of = (1, map) if pool is None else (DELETIONS_AT_ONCE, pool.map)
    with pool or nullcontext():
        for first in range(0, len(deletions), at_once):
            some = deletions[first : first + at_once]
            audit(some)
            for each, error in zip(some, each_of(delete, some), strict=True):
                if error is None:
                    report.deleted.append(each)
                    tell(log.observer, Deleted(key=each.key, size=each.size, why=each.why))
                else:
                    report.failed[each.key] = error
            if report.is_denied:  # it will be so of all
                return


def _abort(log: RunLog, uploads: Iterable[PendingUpload], report: Report) -> None:
    for upload in uploads:
        try:
            log.store.abort_upload(upload)
        except CkptStoreError as error:
            report.failed[upload.key] = error
        else:
            report.aborted.append(upload)


def _record_gone(log: RunLog, seqs: Iterable[int], report: Report) -> None:
    """Append COLLECTED for those of which a fresh listing shows nothing. What could not be deleted stays retired."""
    retired = log.fold.retired
    empty = [seq for seq in seqs if seq in retired and not keys_under(log.store, retired[seq])]
    for first in range(0, len(empty), SEQS_AT_ONCE):
        wanted = empty[first : first + SEQS_AT_ONCE]

        def decide(fold: Fold, wanted: Sequence[int] = wanted) -> Collected | None:
            left = tuple(seq for seq in wanted if seq in fold.retired)
            return Collected(left) if left else None

        appended = log.append(decide)
        if appended is not None and isinstance(appended.record, Collected):
            report.collected += appended.record.seqs
            tell(log.observer, CollectedEvent(seqs=appended.record.seqs))
