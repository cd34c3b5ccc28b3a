"""What the commands have in common: how a run and a checkpoint are named, and what is said before an answer."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptstore.checkpoint import Checkpoint
from ckptstore.cli.access import keep_url
from ckptstore.cli.render import print_warning
from ckptstore.errors import ResumeError
from ckptstore.store import CheckpointStore

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", callback=keep_url, help="The run's root: a path, s3://, gs://, az://, or what else is known."
    ),
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A checkpoint: NAME (its newest selectable one) or NAME@SEQ (exactly).")
]
MaybeName = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]", show_default=False, help="A checkpoint: NAME or NAME@SEQ; by default the latest one."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, errors too.")]


def chosen(store: CheckpointStore, name: str | None) -> Checkpoint:
    """Return the checkpoint `name`, or the latest one.

    Raises:
        ResumeError: Nothing may be selected.
        NotFoundError: There is no such checkpoint.
        UncommittedError: There is data of that name, and no commit.
    """
    if name is not None:
        return store.get(name)
    latest = store.latest()
    if latest is None:
        raise nothing_committed(store)
    return latest


def nothing_committed(store: CheckpointStore) -> ResumeError:
    """Return the error of a run where nothing is committed, which may be a wrong URL."""
    return ResumeError(f"Nothing is committed at {store.url}.", hint="Check the URL; see `ckptstore ls URL --all`.")


def warn_of_lost_tail(store: CheckpointStore) -> None:
    """Say loudly that records are gone, if a hint says so."""
    if store.lost_from is not None:
        print_warning(
            f"THE LOG'S TAIL WAS LOST: latest.json names slot {store.lost_from}, and the log ends before it. "
            "Newer checkpoints were committed here and cannot be seen. "
            "Save nothing; restore the log's objects from a backup or earlier versions."
        )
