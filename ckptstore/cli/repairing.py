"""`repair`: hints, objects from a replica, a log that was lost. It shows what it would do; with --yes it does it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from ckptstore.checkpoint import Checkpoint
from ckptstore.cli.access import open_run, pointed, said
from ckptstore.cli.arguments import AsJson, Url, warn_of_lost_tail
from ckptstore.cli.changing import SingleWriter
from ckptstore.cli.documents import Document, run_document
from ckptstore.cli.exits import Exit
from ckptstore.cli.render import print_json, print_line, print_warning, progress_of
from ckptstore.cli.sharing import Memory, Threads, transfer_of
from ckptstore.errors import InvalidInputError, NotFoundError, ResumeError
from ckptstore.format.records import QUARANTINED
from ckptstore.maintenance.hints import Hint
from ckptstore.maintenance.repair import Mend, Repair
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol.verify import Progress, Verdict
from ckptstore.store import CheckpointStore
from ckptstore.units import counted, format_bytes

LOST = (
    "What stood in the lost log alone is lost: what was set aside, retired, pinned, verified or proved. Something that "
    "was retired is back if its copy was still there. Look at what is there with `ckptstore ls URL`, and go back with "
    "`ckptstore rollback URL NAME` if need be, before a job is started."
)

LATE = (
    "What is NOT committed was left out by a rebuilding before, which has gone on to later ones: terms and attempts "
    "only grow. If no job has started since, delete what that one wrote, all objects under log/, and rebuild again."
)


def repair(  # noqa: PLR0913  (what a person may ask for)
    url: Url,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", show_default=False, help="With --from or --restore, a checkpoint: NAME or NAME@SEQ."
        ),
    ] = None,
    *,
    source: Annotated[
        str | None, typer.Option("--from", metavar="URL2", help="A replica of the run: mend damaged objects from it.")
    ] = None,
    rebuild_log: Annotated[
        bool, typer.Option("--rebuild-log", help="All records are lost: make a new log from the copies of commits.")
    ] = False,
    restores: Annotated[
        bool, typer.Option("--restore", help="Let what was quarantined, and is whole now, be selected again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without it, what would be done is shown.")] = False,
    memory: Memory = "64M",
    threads: Threads = 4,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> int:
    """Repair what can be made again, and guess nothing.

    Without --yes it changes nothing. Hints that are missing or stale are made again from the log.

    With --from, every kept checkpoint, or the named one, is verified at level full, and what is damaged in two readings
    is stored again from the replica: the same bytes that the log names, hashed before they are sent and read back.
    A replica is a whole copy of the run, with its run.json. With --restore alone, what is quarantined is verified so.

    With --rebuild-log, a new log is made from the copies of commits beside the data, of checkpoints whose every byte is
    there. It is refused while there is any record. Stop every job first.
    """
    transfer = transfer_of(memory=memory, threads=threads)
    if rebuild_log and (name is not None or source is not None or restores):
        raise InvalidInputError("--rebuild-log stands alone.", hint="Leave out NAME, --from and --restore.")
    store = open_run(
        url, log=LogOptions(assume_single_writer=single_writer), transfer=transfer, may_be_lost=rebuild_log
    )
    if rebuild_log:
        return _rebuild(store, yes=yes, as_json=as_json)
    if store.run is None:
        raise NotFoundError(
            f"There is no run at {store.url}.",
            hint="Check the URL. If its log and run.json were lost, see `ckptstore repair URL --rebuild-log`.",
        )
    work = store.repair()
    replica = None if source is None else _replica(source, url, transfer)
    if replica is not None:
        work.check_replica(replica)
    if restores and yes:
        work.check_may_restore()
    stale = work.stale_hints()
    if yes:
        work.write_hints(stale)
    targets = _targets(store, name, source, restores=restores)
    with progress_of("verifying, level full", wanted=not as_json) as progress:
        mendings = [_Mending(work, each, replica, progress) for each in targets]
        checkpoints = [each.done(store, restores=restores) if yes else each.shown() for each in mendings]
    document: Document = {
        **run_document(store),
        "applied": yes,
        "ok": all(each["ok"] for each in checkpoints),
        "hints": [{"key": each.key, "why": each.why, "written": yes} for each in stale],
        "checkpoints": checkpoints,
    }
    if as_json:
        print_json(document)
    else:
        _print(document, stale, restores=restores)
        warn_of_lost_tail(store)
    return Exit.FINE if document["ok"] and store.lost_from is None else Exit.BAD


class _Mending:
    """One checkpoint, and the replica, if there is one."""

    def __init__(self, work: Repair, checkpoint: Checkpoint, source: ObjectStore | None, progress: Progress) -> None:
        self._work, self._checkpoint, self._source, self._progress = work, checkpoint, source, progress

    def shown(self) -> Document:
        """Return what would be done."""
        committed = self._checkpoint.committed
        verdict = self._work.verdict(committed, progress=self._progress)
        mends = [*self._work.mends(committed, verdict, self._source)]
        return self._document(mends, verdict, restored=False)

    def done(self, store: CheckpointStore, *, restores: bool) -> Document:
        """Do it, and return what was done. What is retired meanwhile needs nothing any more."""
        committed = self._checkpoint.committed
        try:
            mends, verdict = self._work.mend(committed, self._source, progress=self._progress)
            restorable = restores and verdict.passed and self._work.may_be_restored(committed)
            return self._document(mends, verdict, restored=restorable and store.restore(self._checkpoint))
        except NotFoundError:
            if self._work.is_kept(committed):
                raise
        gone = Verdict("full", committed.seq, (), retired=True)
        return self._document([], gone, restored=False)

    def _document(self, mends: Iterable[Mend], verdict: Verdict, *, restored: bool) -> Document:
        committed = self._checkpoint.committed
        restorable = verdict.passed and not restored and self._work.may_be_restored(committed)
        return {
            "checkpoint_id": committed.commit.checkpoint_id,
            "seq": committed.seq,
            "set_aside": None if restored else committed.set_aside,
            "ok": verdict.passed or verdict.retired,
            "retired": verdict.retired,
            "objects": [{key: value for key, value in asdict(each).items() if key != "seq"} for each in mends],
            "restorable": restorable,
            "restored": restored,
        }


def _targets(store: CheckpointStore, name: str | None, source: str | None, *, restores: bool) -> list[Checkpoint]:
    if source is None and not restores:
        if name is not None:
            raise InvalidInputError("A name needs --from or --restore.", hint="Add --from URL2: a replica of the run.")
        return []
    if name is not None:
        return [store.get(name)]
    found = store.checkpoints(include_set_aside=True)
    return found if source is not None else [each for each in found if each.committed.set_aside == QUARANTINED]


def _replica(source: str, url: str, transfer: TransferOptions) -> ObjectStore:
    """Return the replica. What was said about the way to the store holds for it too if its URL is of the same kind."""
    alike = source.partition("://")[0] == url.partition("://")[0] if "://" in source else "://" not in url
    access = said()
    return open_store(
        source,
        engine=access.engine if alike else None,
        storage_options=access.storage_options if alike else None,
        transfer=transfer,
    )


def _print(document: Document, stale: list[Hint], *, restores: bool) -> None:
    done = document["applied"]
    for hint in stale:
        print_line(f"{'written' if done else 'would be written'}: {hint.key} ({hint.why})")
    if not stale:
        print_line("The hints say what the log says.")
    if not document["checkpoints"]:
        print_line(pointed("No data was looked at: `ckptstore verify URL --all --level full` does that."))
    for each in document["checkpoints"]:
        what = f"{each['checkpoint_id']}@{each['seq']}"
        aside = f" ({each['set_aside']})" if each["set_aside"] else ""
        if each["retired"]:
            print_line(f"{'gone':8} {what}: retired meanwhile, which is no damage")
            continue
        print_line(f"{'ok' if each['ok'] else 'DAMAGED':8} {what}{aside}")
        for mend in each["objects"]:
            size = "" if mend["size"] is None else f", {format_bytes(mend['size'])}"
            print_line(f"    {mend['outcome']}: {mend['key']}{size}")
            print_line(f"        {mend['reason'] or mend['why']}")
        if each["restored"]:
            print_line("    It may be selected again.")
        elif each["restorable"]:
            print_line(pointed(f"    It is whole: `ckptstore restore URL {what}` lets it be selected again."))
    mends = [mend["outcome"] == "can be mended" for each in document["checkpoints"] for mend in each["objects"]]
    restorable = restores and any(each["restorable"] for each in document["checkpoints"])
    if not done and (stale or any(mends) or restorable):
        print_line("Nothing was changed. Add --yes to do it.")


def _rebuild(store: CheckpointStore, *, yes: bool, as_json: bool) -> int:
    work = store.repair()
    plan = work.rebuilding()
    if not plan.found:
        raise ResumeError("No copy of a commit has all of its bytes.", hint="Restore the log from a backup.")
    there = work.rebuild_log(plan) if yes else []
    document: Document = {
        **run_document(store),
        "run": plan.run,
        "applied": yes,
        "found": [
            {
                "checkpoint_id": each.committed.commit.checkpoint_id,
                "prefix": each.committed.commit.prefix,
                "global_step": each.committed.commit.global_step,
                "committed": each.committed.commit.prefix in there,
            }
            for each in plan.found
        ],
        "left_out": [asdict(each) for each in plan.left_out],
    }
    late = [each for each in document["found"] if yes and not each["committed"]]
    if as_json:
        print_json(document)
    else:
        for each in document["found"]:
            told = ("committed" if each["committed"] else "NOT committed") if yes else "would be committed"
            print_line(f"{told}: {each['prefix']}")
        for left in plan.left_out:
            print_warning(f"left out: {left.key}: {left.why}")
        if plan.left_out:
            print_warning(
                "What was left out stays where it is, and no collection takes it while its COMMITTED object is there. "
                "If nobody needs it, delete that object by a tool of the store's own: then a collection takes the rest."
            )
        if late:
            print_warning(LATE)
        many = counted(len(plan.found) - len(late), "checkpoint")
        print_line(many + (" committed." if yes else "; add --yes to write the log."))
        print_line(pointed(LOST))
    return Exit.BAD if late else Exit.FINE
