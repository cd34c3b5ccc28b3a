"""`verify`: whether a run is what was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, cast, get_args

import typer

from ckptstore.cli.access import open_run
from ckptstore.cli.arguments import AsJson, MaybeName, Url, chosen, nothing_committed, warn_of_lost_tail
from ckptstore.cli.changing import SingleWriter
from ckptstore.cli.documents import Document, findings_of, run_document
from ckptstore.cli.exits import Exit
from ckptstore.cli.render import print_json, print_note, progress_of
from ckptstore.cli.sharing import Memory, Subset, Threads, shared_out, transfer_of
from ckptstore.cli.verdicts import judged_document, loss_document, print_verdicts
from ckptstore.errors import IntegrityError, InvalidInputError, NotFoundError
from ckptstore.format.layout import RUN_KEY
from ckptstore.maintenance.scrub import Scrub
from ckptstore.nearest import meant
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol.verify import Level, Progress, Verdict
from ckptstore.store import CheckpointStore


def verify(  # noqa: PLR0913  (what a person may ask for)
    url: Url,
    name: MaybeName = None,
    *,
    level: Annotated[str, typer.Option(metavar="LEVEL", help="chain, exists, etag or full.")] = "exists",
    everything: Annotated[bool, typer.Option("--all", help="Verify every kept checkpoint, set aside or not.")] = False,
    subset: Subset = None,
    memory: Memory = "64M",
    threads: Threads = 4,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Set aside what was found damaged in two readings.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Record in the log what passed whole. Not with a share of the objects.")
    ] = False,
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> int:
    """Verify the log and a checkpoint.

    It reads and judges, and without --quarantine and --record changes nothing; it exits with 1 if not all is well, and
    with 6 if a newer version wrote to the log, which then was not read to its end.

    Each level includes those before it. chain: the records parse and link. exists: every object is there with its
    size. etag: the store itself calls the bytes the same; where it does not they are REWRITTEN, which is no proof of
    damage: ask full. full: BLAKE3 of every byte, which decides.

    What is found damaged is read a second time over a connection of its own. If the newest checkpoint is damaged, older
    ones are verified until one is whole, and what a resume from it loses is said.

    Started by torchrun, or with RANK and WORLD_SIZE set, each process takes its share of the objects and judges that.
    """
    asked = _level(level)
    if everything and name is not None:
        raise InvalidInputError("A name and --all contradict each other.", hint="Give one of them.")
    shared = shared_out(subset)
    if record and (asked == "chain" or not shared.share.is_whole):
        raise InvalidInputError(
            "Only a checkpoint that one process verified whole, at level exists or above, is recorded.",
            hint="Leave out --record, or --subset; unset WORLD_SIZE.",
        )
    store = _opened(url, single_writer=single_writer, transfer=transfer_of(memory=memory, threads=threads))
    if not (shared.share.is_whole or as_json):
        print_note(f"{shared.said}: only a share of the objects is verified")
    scrub, log = store.scrub(subset=(shared.share.index, shared.share.count)), list[Document]()
    if quarantine or record:
        scrub.check_may_note()
    checkpoints, judged = list[Document](), set[str]()
    with progress_of(f"verifying, level {level}", wanted=not as_json) as progress:
        for verdict in _verdicts(store, scrub, name, asked, everything=everything, progress=progress):
            log += findings_of(verdict, of_log=True)
            judged |= {RUN_KEY}.intersection(verdict.objects)
            if verdict.seq is not None:
                quarantined = recorded = False
                with suppress(NotFoundError):  # it is retired meanwhile: its verdict stands
                    quarantined = quarantine and scrub.quarantine(verdict)
                    recorded = record and verdict.passed and scrub.record(verdict)
                checkpoints.append(judged_document(verdict, store, quarantined=quarantined, recorded=recorded))
        lost = loss_document(scrub.loss(level=asked, progress=progress))
    document: Document = {
        **run_document(store),
        "level": level,
        "ok": not log and store.lost_from is None and all(each["ok"] for each in checkpoints),
        "share": {**shared.document, "log": bool(judged)},
        "log": {"ok": not log, "findings": log},
        "checkpoints": checkpoints,
        "loss": lost,
    }
    if as_json:
        print_json(document)
    else:
        print_verdicts(document)
        warn_of_lost_tail(store)
    return Exit.FINE if document["ok"] else Exit.BAD


def _level(text: str) -> Level:
    if text not in get_args(Level):
        raise InvalidInputError(
            f"{text!r:.80} is no level.{meant(text, get_args(Level))}",
            hint=f"Use one of: {', '.join(get_args(Level))}.",
        )
    return cast("Level", text)


def _opened(url: str, *, single_writer: bool, transfer: TransferOptions) -> CheckpointStore:
    try:
        store = open_run(url, log=LogOptions(assume_single_writer=single_writer), transfer=transfer, may_be_lost=True)
    except IntegrityError as error:  # its own hint is to run this very command
        raise IntegrityError(
            f"The log is damaged: {error.message}",
            hint="Restore this object from a backup or an earlier version of it; `ckptstore log URL` shows what is "
            "before it. Nothing was changed.",
            **error.facts,
        ) from error
    store.check_not_lost()  # whose hint stays
    return store


def _verdicts(
    store: CheckpointStore, scrub: Scrub, name: str | None, level: Level, *, everything: bool, progress: Progress
) -> Iterator[Verdict]:
    if everything:
        if level != "chain" and not store.checkpoints(include_set_aside=True):
            raise nothing_committed(store)
        yield from scrub.verify_kept(level=level, progress=progress)
    elif level == "chain" and name is None and store.run is not None:
        yield scrub.verify(None, level=level)
    else:
        yield scrub.verify(chosen(store, name).committed, level=level, progress=progress)
