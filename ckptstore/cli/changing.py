"""`rollback`, `restore`, `pin`, `unpin`: the few changes that an operator makes. Each appends one record, or none."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckptstore.checkpoint import Checkpoint
from ckptstore.cli.access import open_run
from ckptstore.cli.arguments import AsJson, Name, Url
from ckptstore.cli.documents import Document, checkpoint_document, run_document
from ckptstore.cli.exits import Exit
from ckptstore.cli.render import clean, print_json, print_line, print_warning
from ckptstore.errors import InvalidInputError
from ckptstore.options import LogOptions
from ckptstore.store import CheckpointStore

SingleWriter = Annotated[
    bool,
    typer.Option(
        "--assume-single-writer",
        help="Your promise that nobody else writes to this run now; for stores that cannot create only-if-absent. "
        "Fencing does not hold then.",
    ),
]
Holder = Annotated[str, typer.Option(metavar="WHO", help="Who holds it: a job, a person, a team.")]


def rollback(
    url: Url,
    name: Name,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    note: Annotated[str, typer.Option(metavar="TEXT", help="Why; it is recorded.")] = "",
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> int:
    """Make a checkpoint the latest again.

    What was committed after it is set aside, and nothing is deleted. It is written down, so that no later crash undoes
    it. Stop the training job first: what it goes on to save becomes the latest again.
    """
    store = opened(url, single_writer=single_writer)
    target = store.get(name)
    above = [each for each in store.checkpoints() if each.seq > target.seq]
    if above and target.committed.set_aside is None and not yes:
        if as_json or not sys.stdin.isatty():
            raise InvalidInputError("Nobody is there to confirm it.", hint="Add --yes. Nothing was changed.")
        for each in above:
            print_line(f"would be set aside: {each.exact_name}")
        if not typer.confirm(f"Go back to {clean(target.exact_name)}?", err=True):
            print_line("Nothing was changed.")
            return Exit.STOPPED
    exactly = {each.seq: each.exact_name for each in above}
    seqs = store.rollback(target, note=note)
    if as_json:
        print_json({**_changed(store, target, changed=bool(seqs)), "set_aside": seqs})
    elif seqs:
        told = ", ".join(exactly.get(seq, str(seq)) for seq in seqs)
        print_line(f"{target.exact_name} is the latest; set aside: {told}. Nothing was deleted.")
        if store.reign is not None:
            print_line(
                f"Job {store.reign.job} on {store.reign.host} claimed this run last: if it still runs, stop it and "
                "start it again, or what it saves next is the latest."
            )
    else:
        print_line(f"{target.exact_name} is the latest already; nothing was changed.")
    return Exit.FINE


def restore(url: Url, name: Name, *, single_writer: SingleWriter = False, as_json: AsJson = False) -> int:
    """Let a checkpoint that was set aside be selected again.

    So a roll-back is undone. Name it exactly, as NAME@SEQ: `ckptstore ls URL --all` lists what is set aside. If it was
    quarantined, verify it at level full first. If it is the newest, it is the latest from now on.
    """
    store = opened(url, single_writer=single_writer)
    target = store.get(name)
    aside = target.committed.set_aside
    changed = store.restore(target)
    if as_json:
        print_json(_changed(store, target, changed=changed))
    else:
        told = f"may be selected again; it was {aside}" if changed else "was not set aside; nothing was changed"
        print_line(f"{target.exact_name} {told}.")
    return Exit.FINE


def pin(
    url: Url,
    name: Name,
    *,
    holder: Holder,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; it is recorded.")] = "",
    single_writer: SingleWriter = False,
    as_json: AsJson = False,
) -> int:
    """Keep a checkpoint from being retired.

    It is kept until this holder lets go of it with `unpin`.
    """
    store = opened(url, single_writer=single_writer)
    target = store.get(name)
    changed = store.pin(target, holder=holder, reason=reason)
    if as_json:
        print_json({**_changed(store, target, changed=changed), "holder": holder})
    else:
        told = "is pinned" if changed else "was pinned just so already; nothing was changed"
        print_line(f"{target.exact_name} by {holder}: {told}.")
    return Exit.FINE


def unpin(url: Url, name: Name, *, holder: Holder, single_writer: SingleWriter = False, as_json: AsJson = False) -> int:
    """Let go of a checkpoint. Other holders keep it."""
    store = opened(url, single_writer=single_writer)
    target = store.get(name)
    changed = store.unpin(target, holder=holder)
    if as_json:
        print_json({**_changed(store, target, changed=changed), "holder": holder})
    else:
        told = "is no longer pinned" if changed else "was not pinned; nothing was changed"
        print_line(f"{target.exact_name} by {holder}: {told}.")
    return Exit.FINE


def opened(url: str, *, single_writer: bool) -> CheckpointStore:
    """Return the run at `url` for a change, and say aloud what a promise of a single writer means."""
    if single_writer:
        print_warning(
            "A single writer is promised, so fencing does not hold: if another process writes now, "
            "a checkpoint may be lost."
        )
    store = open_run(url, log=LogOptions(assume_single_writer=single_writer))
    store.check_may_append()  # before anything is shown, or anybody is asked
    return store


def _changed(store: CheckpointStore, target: Checkpoint, *, changed: bool) -> Document:
    """Return what became of it, with the checkpoint as it stands now."""
    now = checkpoint_document(store.get(seq=target.seq))
    return {**run_document(store), "changed": changed, "checkpoint": now}
