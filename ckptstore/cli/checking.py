"""`verify`: whether a run is what was written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, cast, get_args

import typer

from ckptstore.cli.access import open_run
from ckptstore.cli.arguments import AsJson, MaybeName, Url, chosen, nothing_committed, warn_of_lost_tail
from ckptstore.cli.documents import Document, findings_of, run_document, verdict_document
from ckptstore.cli.exits import Exit
from ckptstore.cli.render import print_json, print_line, progress_of
from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.nearest import meant
from ckptstore.protocol.verify import Level, Progress, Verdict
from ckptstore.store import CheckpointStore
from ckptstore.units import format_bytes


def verify(
    url: Url,
    name: MaybeName = None,
    *,
    level: Annotated[str, typer.Option(metavar="LEVEL", help="chain, exists, etag or full.")] = "exists",
    everything: Annotated[bool, typer.Option("--all", help="Verify every kept checkpoint, set aside or not.")] = False,
    as_json: AsJson = False,
) -> int:
    """Verify the log and a checkpoint.

    It reads and judges, and changes nothing; it exits with 1 if not all is well, and with 6 if a newer version wrote
    to the log, which then was not read to its end.

    Each level includes those before it. chain: the records parse and link. exists: every object is there with its
    size. etag: the store itself calls the bytes the same; where it does not they are REWRITTEN, which is no proof of
    damage: ask full. full: BLAKE3 of every byte, which decides.
    """
    if level not in get_args(Level):
        raise InvalidInputError(
            f"{level!r:.80} is no level.{meant(level, get_args(Level))}",
            hint=f"Use one of: {', '.join(get_args(Level))}.",
        )
    if everything and name is not None:
        raise InvalidInputError("A name and --all contradict each other.", hint="Give one of them.")
    store = _opened(url)
    log: list[Document] = []
    checkpoints: list[Document] = []
    with progress_of(f"verifying, level {level}", wanted=not as_json) as progress:
        for verdict in _verdicts(store, name, cast("Level", level), everything=everything, progress=progress):
            log += findings_of(verdict, of_log=True)
            if verdict.seq is not None:
                checkpoints.append(verdict_document(verdict, store.get(seq=verdict.seq)))
    ok = not log and store.lost_from is None and all(each["ok"] for each in checkpoints)
    if as_json:
        judged = {"level": level, "ok": ok, "log": {"ok": not log, "findings": log}, "checkpoints": checkpoints}
        print_json({**run_document(store), **judged})
    else:
        _print_verdicts(log, checkpoints, level)
        warn_of_lost_tail(store)
    return Exit.FINE if ok else Exit.BAD


def _opened(url: str) -> CheckpointStore:
    try:
        return open_run(url)
    except IntegrityError as error:  # its own hint is to run this very command
        raise IntegrityError(
            f"The log is damaged: {error.message}",
            hint="Restore this object from a backup or an earlier version of it; `ckptstore log URL` shows what is "
            "before it. Nothing was changed.",
            **error.facts,
        ) from error


def _verdicts(
    store: CheckpointStore, name: str | None, level: Level, *, everything: bool, progress: Progress
) -> Iterator[Verdict]:
    if everything:
        if level != "chain" and not store.checkpoints(include_set_aside=True):
            raise nothing_committed(store)
        yield from store.verify_kept(level=level, progress=progress)
    elif level == "chain" and name is None and store.run is not None:
        yield store.verify(level=level)
    else:
        yield store.verify(chosen(store, name), level=level, progress=progress)


def _print_verdicts(log: list[Document], checkpoints: list[Document], level: str) -> None:
    print_line("DAMAGED  the log" if log else "ok       the log: its records link")
    _print_findings(log)
    for each in checkpoints if level != "chain" else []:
        what = f"{each['checkpoint_id']}@{each['seq']}"
        aside = f" ({each['set_aside']})" if each["set_aside"] else ""
        read = f", {format_bytes(each['bytes_read'])} of shards hashed" if level == "full" else ", contents not read"
        print_line(f"{_judgement(each['findings']):8} {what}{aside}: level {level}{read}")
        _print_findings(each["findings"])


def _judgement(findings: list[Document]) -> str:
    if not findings:
        return "ok"
    return "REWRITTEN" if all(each["kind"] == "rewritten" for each in findings) else "DAMAGED"


def _print_findings(findings: list[Document]) -> None:
    for each in findings:
        print_line(f"    {each['kind']} ({each['level']}): {each['key']}")
        print_line(f"        {each['message']}")
