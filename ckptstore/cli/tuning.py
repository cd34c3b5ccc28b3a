"""`tune`: which transfer options suit a store."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer

from ckptstore.cli.access import said
from ckptstore.cli.arguments import AsJson, Url
from ckptstore.cli.documents import Document
from ckptstore.cli.exits import Exit
from ckptstore.cli.render import print_json, print_line, print_table, print_warning, status_of
from ckptstore.maintenance.tune import Bounds, Tried, Tuning
from ckptstore.maintenance.tune import tune as tuned
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.units import MIB, format_bytes


def tune(
    url: Url,
    *,
    transfer_mib: Annotated[
        int, typer.Option("--transfer-mib", metavar="N", help="A rank may hold so many MiB of bytes on their way.")
    ] = 64,
    sample_mib: Annotated[
        int, typer.Option("--sample-mib", metavar="N", help="The largest object that is written, in MiB.")
    ] = 256,
    seconds: Annotated[float, typer.Option(metavar="N", help="After so long no other measurement begins.")] = 120.0,
    as_json: AsJson = False,
) -> int:
    """Find the fastest transfer options for URL, from this machine.

    It sends and reads objects of its own under probe/ of the run's root, hashed as always, and deletes them, also after
    Ctrl-C. Run it where the training runs, and on as many machines at once as will save at once: they share the store.

    What it prints last is an argument for CkptStoreWriter and CkptStoreReader. Of what is about as fast as the fastest,
    it is what holds the least memory.
    """
    bounds = Bounds(transfer_bytes=transfer_mib * MIB, sample_bytes=sample_mib * MIB, seconds=seconds)

    def store_with(options: TransferOptions) -> ObjectStore:
        return open_store(url, engine=said().engine, storage_options=said().storage_options, transfer=options)

    with status_of("measuring", wanted=not as_json) as status:
        tuning = tuned(store_with, bounds=bounds, watch=status)
    if as_json:
        print_json(_document(store_with(TransferOptions()).url, tuning))
    else:
        _print(tuning)
    return Exit.FINE


def as_argument(options: TransferOptions) -> str:
    """Return what to write in a call of `CkptStoreWriter` for these options."""
    said = ", ".join(f"{name}={value}" for name, value in _settings(options).items())
    return f"transfer=TransferOptions({said})"


def _settings(options: TransferOptions) -> dict[str, int]:
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name != "retry"}


def _document(url: str, tuning: Tuning) -> Document:
    return {
        "url": url,
        "transfer": _settings(tuning.best),
        "argument": as_argument(tuning.best),
        "complete": tuning.is_whole,
        "sample_bytes": tuning.sample_bytes,
        "tried": [
            {
                "way": each.way,
                "transfer": _settings(each.options),
                "mib_per_second": each.mib_per_second,
                "failure": each.failure or None,
            }
            for each in tuning.tried
        ],
        "left_behind": list(tuning.left_behind),
    }


def _print(tuning: Tuning) -> None:
    for way, headers in (
        ("save", ("SAVE", "AT ONCE", "HASHED BY", "MIB/S")),
        ("load", ("LOAD", "AT ONCE", "", "MIB/S")),
    ):
        rows = [_row(each) for each in tuning.tried if each.way == way]
        print_table(headers, rows, right=("AT ONCE", "HASHED BY", "MIB/S"))
        print_line()
    if not tuning.is_whole:
        print_warning("Time was up before everything was measured: allow more with --seconds.")
    if tuning.sample_bytes < tuning.best.transfer_bytes:
        print_warning(f"This store is slow: objects of {format_bytes(tuning.sample_bytes)} fill no large parts.")
    if tuning.left_behind:
        print_warning(f"{len(tuning.left_behind)} objects could not be deleted: {', '.join(tuning.left_behind[:5])}.")
    print_line(as_argument(tuning.best))


def _row(tried: Tried) -> tuple[object, ...]:
    options, speed = tried.options, tried.mib_per_second
    shown = tried.failure if speed is None else speed
    if tried.way == "load":
        return format_bytes(options.fetch_bytes), options.fetches_in_flight, "", shown
    return format_bytes(options.part_bytes), options.parts_in_flight, options.hash_threads, shown
