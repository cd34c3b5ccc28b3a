"""`ls`, `latest`, `log`: what is in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ckptstore.cli.access import open_run, said
from ckptstore.cli.arguments import AsJson, Url, nothing_committed, warn_of_lost_tail
from ckptstore.cli.documents import (
    Document,
    attempt_document,
    checkpoint_document,
    error_document,
    record_document,
    reign_document,
    run_document,
)
from ckptstore.cli.exits import Exit, exit_for
from ckptstore.cli.render import print_error, print_json, print_line, print_note, print_table
from ckptstore.errors import CkptStoreError, IntegrityError
from ckptstore.format.version import FORMAT
from ckptstore.protocol.log import Entry
from ckptstore.store import CheckpointStore
from ckptstore.units import counted, format_bytes, some

DEAD, IN_PROGRESS = "dead", "in progress"
WHY = {
    IN_PROGRESS: "its commit may still come, or its job died: the next claim will say",
    DEAD: "it can never commit: a newer job claimed the run, or a later attempt committed",
}


def ls(
    url: Url,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Show too what is set aside, uncommitted or ignored, and why.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List what is committed, newest first.

    With --json everything is in the document, always.
    """
    store = open_run(url)
    attempts = store.uncommitted()  # first, so that nothing is missing in both lists if it commits in between
    checkpoints = store.checkpoints(include_set_aside=True)
    prefixes = {each.commit.prefix for each in checkpoints}
    lines = [checkpoint_document(each) for each in checkpoints]
    selectable = [line for line in lines if line["set_aside"] is None]
    document = {
        **run_document(store),
        "latest": selectable[0]["seq"] if selectable else None,
        "reign": reign_document(store),
        "committed": selectable,
        "set_aside": [line for line in lines if line["set_aside"] is not None],
        "uncommitted": [attempt_document(each) for each in attempts if str(each.stem) not in prefixes],
        "ignored": [{"seq": each.seq, "kind": each.kind, "reason": each.reason} for each in store.ignored],
    }
    if as_json:
        print_json(document)
        return Exit.FINE
    _print_committed(document)
    if everything:
        _print_rest(document)
    else:
        _print_summary(document)
    _print_reign(document["reign"])
    warn_of_lost_tail(store)
    return Exit.FINE


def latest(url: Url, *, as_json: AsJson = False) -> int:
    """Print the newest checkpoint as NAME@SEQ.

    It is the newest commit that is not set aside, whatever its step.
    """
    store = open_run(url)
    found = store.latest()
    document = {**run_document(store), "checkpoint": None if found is None else checkpoint_document(found)}
    if as_json:
        print_json(document)
    elif found is None:
        nothing = error_document(nothing_committed(store))
        print_error(nothing["message"], nothing["hint"])
    else:
        print_line(found.exact_name)
    if not as_json:
        warn_of_lost_tail(store)
    return Exit.BAD if found is None else Exit.FINE


def log(url: Url, *, as_json: AsJson = False) -> int:
    """Print every record of the log, in order.

    Of a damaged log, those before the damage and then the error.
    """
    document: Document = {"url": None, "run": None, "lost_tail": None}
    entries: list[Entry] = []
    error: CkptStoreError | None = None
    ignored: dict[int, str] = {}
    try:
        store = open_run(url)
        document = run_document(store)
        entries.extend(store.records())
    except IntegrityError as damage:
        error, entries = (
            damage,
            list(
                CheckpointStore.readable_records(
                    url, engine=said().engine, storage_options=said().storage_options, signing=said().signing
                )
            ),
        )
    except CkptStoreError as other:
        if not entries:
            raise
        error = other
    else:
        ignored = {each.seq: each.reason for each in store.ignored}
    told = error_document(error) if error else {}
    document["records"] = [record_document(entry, ignored) for entry in entries]
    if as_json:
        print_json({**document, **told})
    else:
        _print_records(document["records"])
        if error is None:
            warn_of_lost_tail(store)
        else:
            print_error(told["message"], told["hint"])
    return exit_for(error) if error else Exit.FINE


def _print_committed(document: Document) -> None:
    run = f"run {document['run']}" if document["run"] else "there is no run yet"
    print_line(f"{document['url']}  ({run})")
    print_line()
    if document["committed"]:
        _print_checkpoints(document["committed"], latest=document["latest"])
    else:
        print_line("Nothing is committed here.")
    if not document["run"]:
        print_note("Check the URL: it must be the run's own root, where run.json is.")


def _print_checkpoints(lines: Sequence[Document], *, latest: int | None) -> None:
    rows = [
        (
            line["seq"],
            line["global_step"],
            line["saved_world_size"],
            format_bytes(line["bytes"]),
            when(line["committed_at"]),
            line["checkpoint_id"],
            _notes(line, latest=latest),
        )
        for line in lines
    ]
    print_table(
        ("SEQ", "STEP", "RANKS", "SIZE", "COMMITTED (UTC)", "NAME", "NOTES"),
        rows,
        right=("SEQ", "STEP", "RANKS", "SIZE"),
    )


def _notes(line: Document, *, latest: int | None) -> str:
    notes = ["latest"] if line["seq"] == latest else []
    notes += [line["set_aside"]] if line["set_aside"] else []
    notes += [f"pinned by {some([pin['holder'] for pin in line['pins']])}"] if line["pins"] else []
    notes += [f"verified: {line['verified']}"] if line["verified"] else []
    notes += ["proved"] if line["proved"] else []  # `show` has the verdict
    return "; ".join(notes)


def _print_summary(document: Document) -> None:
    """One line for all that is not shown."""
    hidden = []
    if aside := document["set_aside"]:
        hidden.append(f"{len(aside)} set aside")
    if attempts := document["uncommitted"]:
        states = Counter(each["state"] for each in attempts)
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        objects, size = sum(each["objects"] for each in attempts), sum(each["bytes"] for each in attempts)
        hidden.append(f"{told} ({counted(objects, 'object')}, {format_bytes(size)})")
    if ignored := document["ignored"]:
        hidden.append(counted(len(ignored), "ignored record"))
    if hidden:
        print_line()
        print_line(f"Not shown without --all: {'; '.join(hidden)}.")


def _print_rest(document: Document) -> None:
    if aside := document["set_aside"]:
        print_line()
        print_line("Set aside: not loaded unless named exactly, as NAME@SEQ; nothing of them is deleted.")
        _print_checkpoints(aside, latest=None)
    for state in (IN_PROGRESS, DEAD):
        if found := [each for each in document["uncommitted"] if each["state"] == state]:
            print_line()
            print_line(f"Not committed, {state}: {WHY[state]}.")
            _print_attempts(found)
    if ignored := document["ignored"]:
        print_line()
        print_line("Ignored records: not valid where they stand, so they change nothing.")
        rows = [(each["seq"], each["kind"], each["reason"]) for each in ignored]
        print_table(("SEQ", "KIND", "WHY"), rows, right=("SEQ",))


def _print_attempts(attempts: Sequence[Document]) -> None:
    rows = [
        (
            each["term"],
            each["attempt"],
            each["objects"],
            format_bytes(each["bytes"]),
            when(each["last_write"]),
            each["checkpoint_id"],
        )
        for each in attempts
    ]
    right = ("TERM", "ATTEMPT", "OBJECTS", "SIZE")
    print_table((*right, "LAST WRITE (UTC)", "NAME"), rows, right=right)


def _print_reign(reign: Document | None) -> None:
    if reign is not None:
        since = "" if reign["committed_since"] else "; no commit since"
        print_line()
        print_line(  # the log does not say whether it still runs
            f"Last claimed by job {reign['job']} on {reign['host']} (term {reign['term']}) "
            f"at {when(reign['claimed_at'])} UTC{since}."
        )


def _print_records(records: Sequence[Document]) -> None:
    signed = any(each["signed_by"] for each in records)
    rows = [
        (
            each["seq"],
            when(each["written_at"]),
            each["record"]["kind"],
            *([(each["signed_by"] or "nobody")[:16]] if signed else []),
            _told(each["record"], each["ignored"]),
        )
        for each in records
    ]
    if rows:
        print_table(("SEQ", "WRITTEN (UTC)", "KIND", *(["SIGNED BY"] if signed else []), "WHAT"), rows, right=("SEQ",))
    else:
        print_line("The log has no records.")


_ENVELOPE = {"format", "kind", "run", "seq", "writer", "written_at", "prev", "fold", "signature", "signed_by", "self"}


def _told(record: dict[str, Any], ignored: str | None) -> str:
    """Return what a record says, in a line."""
    kind = record["kind"] if record["format"] == FORMAT else None  # of another format only the words are known
    if kind == "COMMIT":
        shards = record["shards"]
        told = (
            f"{record['checkpoint_id']}, step {record['global_step']}, {counted(shards['count'], 'shard')}, "
            f"{format_bytes(shards['bytes'])}, term {record['term']}, attempt {record['attempt']}"
        )
    elif kind == "CLAIM":
        told = f"term {record['term']}, job {record['job']} on {record['host']}"
    else:
        told = ", ".join(f"{name} {value}" for name, value in record.items() if name not in _ENVELOPE and value != "")
    return f"IGNORED ({ignored}): {told}" if ignored else told


def when(moment: str | None) -> str | None:
    """Return a moment to the second, without the letters between."""
    return None if moment is None else moment[:19].replace("T", " ")
