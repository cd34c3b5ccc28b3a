"""`retire` and `gc`: what lets checkpoints go. The plan that was shown is the plan that is applied (I17)."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from ckptstore.checkpoint import Checkpoint
from ckptstore.cli.access import pointed
from ckptstore.cli.arguments import AsJson, Url
from ckptstore.cli.changing import SingleWriter, opened
from ckptstore.cli.doctor_uploads import duration
from ckptstore.cli.documents import Document, error_document, run_document
from ckptstore.cli.exits import Exit, exit_for
from ckptstore.cli.render import print_json, print_line, print_note, print_table, print_warning
from ckptstore.clock import SystemClock, timestamp
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.collect import Report
from ckptstore.maintenance.collect_plan import Deletion, Plan
from ckptstore.maintenance.retention import Keep, unmatched
from ckptstore.store import CheckpointStore
from ckptstore.units import counted, format_bytes
from ckptstore.wholefile import file_at

KeepLast = Annotated[int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest so many.")]
KeepBest = Annotated[
    str | None,
    typer.Option("--keep-best", metavar="METRIC:MODE:N", help="Keep the N best: val_loss:min:3, accuracy:max:1."),
]
KeepEvery = Annotated[
    int | None, typer.Option("--keep-every", metavar="STEPS", help="Keep those whose step is a multiple.")
]
KeepHourly = Annotated[
    int | None, typer.Option("--keep-hourly", metavar="N", help="Keep the newest of each of the last N hours with one.")
]
KeepDaily = Annotated[
    int | None, typer.Option("--keep-daily", metavar="N", help="Keep the newest of each of the last N days with one.")
]
KeepTag = Annotated[
    list[str] | None, typer.Option("--keep-tag", metavar="TAG", help="Keep those with this tag; as often as needed.")
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why; it is recorded. By default the policy itself.")]


def retire(  # noqa: PLR0913  (an option each)
    url: Url,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", show_default=False, help="Checkpoints: NAME or NAME@SEQ.")
    ] = None,
    *,
    keep_last: KeepLast = None,
    keep_best: KeepBest = None,
    keep_every: KeepEvery = None,
    keep_hourly: KeepHourly = None,
    keep_daily: KeepDaily = None,
    keep_tag: KeepTag = None,
    reason: Reason = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> int:
    """Let checkpoints go for ever.

    By name, or all that no --keep-... rule keeps. It is final; nothing is deleted yet: `gc` deletes what is
    retired. Never retired are the newest, the newest that was verified at level full, what is pinned, and what would
    leave fewer than two; by a rule neither are the second newest and what is quarantined, and what was abandoned by
    a roll-back only when it is older than all that --keep-last keeps.
    """
    keep = keep_of(keep_last, keep_best, keep_every, keep_hourly, keep_daily, keep_tag)
    if bool(names) == (keep is not None):
        raise InvalidInputError("Name checkpoints, or give --keep-... rules, and not both.", hint="See --help.")
    store = opened(url, single_writer=single_writer)
    if keep is None:
        targets = [*{each.seq: each for each in (_only(store, name) for name in names or ())}.values()]
        store.check_retirement(*targets)  # before anybody is asked
        wanted = [each.seq for each in targets]
    else:
        for line in unmatched([each.committed for each in store.checkpoints()], keep):
            print_warning(line)
        wanted = list(store.plan_retirement(keep))
    exactly = _exact_names(store)
    if wanted and not yes:
        for seq in wanted if not as_json else ():
            print_line(f"would be retired: {exactly[seq]}")
        if as_json or not sys.stdin.isatty():
            raise InvalidInputError(
                "Nobody is there to confirm it.",
                hint="Add --yes. Nothing was changed.",
                seqs=wanted,
                names=[exactly[seq] for seq in wanted],
            )
        if not typer.confirm("Retire them for ever?", err=True):
            print_line("Nothing was changed.")
            return Exit.STOPPED
    seqs = store.retire(*targets, reason=reason) if keep is None else store.retire_by(keep, shown=wanted, reason=reason)
    if as_json:
        print_json({**run_document(store), "changed": bool(seqs), "retired": seqs})
    elif seqs:
        print_line(f"Retired: {', '.join(exactly.get(seq, str(seq)) for seq in seqs)}.")
        print_line(pointed("Nothing was deleted yet: see `ckptstore gc URL`."))
    else:
        where = "Nothing is to be retired" if store.run else f"There is no run at {store.url}"
        print_line(f"{where}; nothing was changed.")
    return Exit.FINE


def _only(store: CheckpointStore, name: str) -> Checkpoint:
    """Return the checkpoint of a name, if it is the only one: it is final, and a second call must not take another."""
    found = store.get(name)
    same = [each for each in store.checkpoints(include_set_aside=True) if each.checkpoint_id == name]
    if len(same) > 1:
        raise InvalidInputError(
            f"{len(same)} checkpoints have the name {name!r:.80}: which one is meant is not said.",
            hint=f"Write {found.exact_name}, say; see `ckptstore ls URL --all`.",
            seqs=[each.seq for each in same],
        )
    return found


def gc(  # noqa: PLR0913  (an option each)
    url: Url,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its digest; the default.")] = False,
    apply: Annotated[
        str | None, typer.Option("--apply", metavar="DIGEST", help="Do what the plan with this digest says.")
    ] = None,
    keep_last: KeepLast = None,
    keep_best: KeepBest = None,
    keep_every: KeepEvery = None,
    keep_hourly: KeepHourly = None,
    keep_daily: KeepDaily = None,
    keep_tag: KeepTag = None,
    grace: Annotated[
        str,
        typer.Option(metavar="SECONDS", help="How long what is retired or orphaned stays: 3600, 90s, 24h, 7d, or 0."),
    ] = "3600",
    reason: Reason = "",
    audit: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Append a line of JSON for each deletion to this file, before it is sent."),
    ] = None,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> int:
    """Delete what nothing needs any more.

    That is what is retired, what can never commit, and uploads that never ended. Without --apply nothing is
    changed: it prints what would be done, and a digest. With --apply it plans again, and does it if the plan is
    still the one with that digest; give the same --keep-... and --grace. Killed at any moment, the next one goes
    on.

    --keep-... rules retire first what none of them keeps (see `retire --help`); what is retired now is deleted after
    the grace, by a later run, or at once with --grace 0. The grace is by the store's clock, for readers that have not
    pinned what they read: no checkpoint is safer for it.
    """
    if dry_run and apply is not None:
        raise InvalidInputError("--dry-run and --apply exclude each other.", hint="Give one of them.")
    keep = keep_of(keep_last, keep_best, keep_every, keep_hourly, keep_daily, keep_tag)
    grace_seconds = _seconds(grace)
    store = opened(url, single_writer=single_writer)
    if apply is None:
        plan = store.plan_collection(keep=keep, grace_seconds=grace_seconds)
        document = {**run_document(store), **_plan_document(plan), "applied": False}
        print_json(document) if as_json else _print_plan(store, plan)
        return Exit.FINE
    file = None if audit is None else file_at(audit, outside=store.url)
    with _audited(file, shown=not as_json) as told:
        report = store.collect(digest=apply, keep=keep, grace_seconds=grace_seconds, reason=reason, audit=told)
    if as_json:
        print_json({**run_document(store), **_plan_document(report.plan), "applied": True, **_report_document(report)})
    else:
        _print_report(report)
    return max((exit_for(error) for error in report.failed.values()), default=Exit.FINE)


def keep_of(
    last: int | None,
    best: str | None,
    every: int | None,
    hourly: int | None,
    daily: int | None,
    tags: Sequence[str] | None,
) -> Keep | None:
    """Return the policy that options ask for; None if none does.

    Raises:
        InvalidInputError: One is not what it must be.
    """
    if (last, best, every, hourly, daily) == (None,) * 5 and not tags:
        return None
    return Keep(last=last, best=_best(best), every=every, hourly=hourly, daily=daily, tags=tuple(tags or ()))


def _best(text: str | None) -> tuple[str, Literal["min", "max"], int] | None:
    if text is None:
        return None
    metric, _, rest = text.rpartition(":")[0].rpartition(":")
    count = text.rpartition(":")[2]
    if not metric or rest not in ("min", "max") or not (count.isascii() and count.isdigit()) or len(count) > 9:  # noqa: PLR2004
        raise InvalidInputError(
            f"--keep-best {text!r:.80} is not METRIC:MODE:N, with MODE min or max.", hint="Write val_loss:min:3, say."
        )
    return metric, cast("Literal['min', 'max']", rest), int(count)


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 9 else duration(text)  # noqa: PLR2004


def _exact_names(store: CheckpointStore) -> dict[int, str]:
    return {each.seq: each.exact_name for each in store.checkpoints(include_set_aside=True)}


@contextmanager
def _audited(path: Path | None, *, shown: bool) -> Iterator[Callable[[Sequence[Deletion]], None]]:
    """Yield what writes a line for each deletion before it is sent: so none is ever without one.

    Raises:
        InvalidInputError: The file cannot be opened; raised by what is yielded, it cannot be written any more.
    """
    with ExitStack() as stack:
        try:
            file = None if path is None else stack.enter_context(open(path, "a+b", buffering=0))  # noqa: PTH123
            if file is not None and file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                file.write(b"\n")  # after a line that had no room
        except OSError as error:
            raise InvalidInputError(
                f"{path} cannot be written: {error.strerror}.", hint="Name another file."
            ) from error

        def tell(deletions: Sequence[Deletion]) -> None:
            if file is not None:
                at = timestamp(SystemClock())
                lines = [json.dumps({"at": at, **_deletion_document(each)}) + "\n" for each in deletions]
                left = "".join(lines).encode()
                try:
                    while left:
                        left = left[file.write(left) :]
                    os.fsync(file.fileno())
                except OSError as error:
                    raise InvalidInputError(
                        f"{path} cannot be written any more: {error.strerror}. What has no line there was not deleted; "
                        "what was retired stays retired.",
                        hint="Make room, or name another file, and look at the new plan: `ckptstore gc URL`.",
                    ) from error
            if shown:
                for each in deletions:
                    print_line(f"delete {each.key}  {format_bytes(each.size)}  {each.why}")

        yield tell


def _deletion_document(each: Deletion) -> Document:
    return {"key": each.key, "bytes": each.size, "why": each.why}


def _plan_document(plan: Plan) -> Document:
    return {
        "digest": plan.digest,
        "retire": list(plan.retire),
        "delete": [_deletion_document(each) for each in plan.delete],
        "abort": [{"key": each.key, "upload_id": each.upload_id} for each in plan.abort],
        "gone": list(plan.gone),
        "waiting": [
            {"prefix": each.prefix, "objects": each.objects, "bytes": each.bytes, "why": each.why}
            for each in plan.waiting
        ],
        "foreign": list(plan.foreign),
        "notes": list(plan.notes),
    }


def _report_document(report: Report) -> Document:
    return {
        "retired": report.retired,
        "deleted": [_deletion_document(each) for each in report.deleted],
        "aborted": [{"key": each.key, "upload_id": each.upload_id} for each in report.aborted],
        "collected": report.collected,
        "failed": {key: error_document(error) for key, error in report.failed.items()},
    }


def _print_plan(store: CheckpointStore, plan: Plan) -> None:
    print_line(f"{plan.url}  ({f'run {plan.run}' if plan.run else 'there is no run'})")
    print_line()
    rows: list[tuple[Any, ...]] = []
    names = _exact_names(store) if plan.retire else {}
    rows += [("retire", None, None, names.get(seq, str(seq)), "no rule keeps it") for seq in plan.retire]
    by_attempt: dict[tuple[str, str], list[int]] = defaultdict(list)
    for each in plan.delete:
        by_attempt[each.key.split("/")[2], each.why].append(each.size)
    rows += [
        ("delete", len(sizes), format_bytes(sum(sizes)), prefix, why) for (prefix, why), sizes in by_attempt.items()
    ]
    rows += [("abort", None, None, each.key, "an upload that never ended") for each in plan.abort]
    rows += [("record", None, None, str(seq), "nothing is left of it") for seq in plan.gone]
    rows += [("wait", each.objects, format_bytes(each.bytes), each.prefix, each.why) for each in plan.waiting]
    rows += [("leave", 1, None, key, "foreign: its key is none of this run's") for key in plan.foreign]
    if rows:
        print_table(("DO", "OBJECTS", "SIZE", "WHAT", "WHY"), rows, right=("OBJECTS", "SIZE"))
        print_line()
    for note in plan.notes:
        print_note(pointed(note))
    if plan.is_empty:
        print_line("There is nothing to do yet." if plan.waiting else "There is nothing to do.")
        return
    size = format_bytes(sum(each.size for each in plan.delete))
    print_line(
        f"{counted(len(plan.retire), 'checkpoint')} to retire; {counted(len(plan.delete), 'object')} of {size} to "
        f"delete; {counted(len(plan.abort), 'upload')} to abort."
    )
    print_line(f"digest {plan.digest}")
    print_line(pointed(f"Nothing was changed. Add --apply {plan.digest} to do it."))


def _print_report(report: Report) -> None:
    print_line(
        f"{counted(len(report.retired), 'checkpoint')} retired; {counted(len(report.deleted), 'object')} of "
        f"{format_bytes(sum(each.size for each in report.deleted))} deleted; "
        f"{counted(len(report.aborted), 'upload')} aborted; nothing is left of "
        f"{counted(len(report.collected), 'checkpoint')}."
    )
    for note in report.plan.notes:
        print_note(pointed(note))
    for key, error in list(report.failed.items())[:1]:
        print_warning(
            f"{len(report.failed)} could not be deleted, {key} for one: {error.message} {pointed(error.hint)} "
            "The next collection tries again."
        )
