"""`metrics` and `alerts`: what a bucket tells Prometheus, and what Prometheus makes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from ckptstore.cli.access import log_options, said
from ckptstore.cli.arguments import AsJson, Url
from ckptstore.cli.documents import Document
from ckptstore.cli.exits import Exit
from ckptstore.cli.render import print_json, print_line
from ckptstore.clock import SystemClock
from ckptstore.errors import InvalidInputError
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.log import RunLog
from ckptstore.telemetry import Thresholds, bucket_families, dashboard, rules
from ckptstore.telemetry.alerts import MAX_BYTES
from ckptstore.telemetry.client import check_label, exposition
from ckptstore.telemetry.from_bucket import values_of
from ckptstore.units import GIB
from ckptstore.wholefile import HINT, check_writable, write_whole

RULES, DASHBOARD = "ckptstore-rules.yml", "ckptstore-dashboard.json"


def metrics(
    url: Url,
    *,
    run: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The label `run` of every metric; by default the last part of URL."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write this file, whole, for node_exporter's textfile collector, and print nothing."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Print what the bucket alone says of a run, in Prometheus' text format.

    It reads the log and lists all data of the run; nothing is written there. Run it every few minutes.
    """
    if out is not None and as_json:
        raise InvalidInputError("--json prints, and --out FILE prints nothing.", hint="Give one of them.")
    store = open_store(url, engine=said().engine, storage_options=said().storage_options)
    named = store.url.rstrip("/").rpartition("/")[2] if run is None else run
    check_label(named)
    if out is not None:
        check_writable(out, outside=store.url)
    catalog = Catalog(RunLog.open(store, options=log_options()))
    families = bucket_families(catalog, run=named, clock=SystemClock())
    if out is not None:
        write_whole(out, exposition(families))
    elif as_json:
        head: Document = {"url": store.url, "run": catalog.log.run, "lost_tail": catalog.log.lost_from}
        print_json({**head, "metrics": list(values_of(families))})
    else:
        _print(exposition(families).decode())
    return Exit.FINE


_USUAL = Thresholds()


def alerts(  # noqa: PLR0913  (an option each)
    *,
    wants_rules: Annotated[bool, typer.Option("--rules", help="Print the rules; the default.")] = False,
    wants_dashboard: Annotated[bool, typer.Option("--dashboard", help="Print the dashboard instead.")] = False,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help=f"Write {RULES} and {DASHBOARD} there, and print nothing.")
    ] = None,
    recovery_point_seconds: Annotated[
        float, typer.Option(metavar="N", help="How old the newest checkpoint may be.")
    ] = _USUAL.recovery_point_seconds,
    verified_point_seconds: Annotated[
        float, typer.Option(metavar="N", help="The same of the newest that is verified byte by byte.")
    ] = _USUAL.verified_point_seconds,
    proved_point_seconds: Annotated[
        float, typer.Option(metavar="N", help="The same of the newest from which a resume was proved.")
    ] = _USUAL.proved_point_seconds,
    commit_lag_seconds: Annotated[
        float, typer.Option(metavar="N", help="How long a save may take until it is committed.")
    ] = _USUAL.commit_lag_seconds,
    busy_seconds: Annotated[
        float, typer.Option(metavar="N", help="For how long saves may follow each other without a pause.")
    ] = _USUAL.busy_seconds,
    orphan_gib: Annotated[
        float, typer.Option("--orphan-gib", metavar="N", help="How many GiB may be left of saves that died.")
    ] = _USUAL.orphan_bytes / GIB,
    for_seconds: Annotated[
        float, typer.Option(metavar="N", help="How long a condition that may pass must hold.")
    ] = _USUAL.for_seconds,
) -> int:
    """Print Prometheus rules for these metrics, or a Grafana dashboard.

    Each alert says in its annotation `command` what to run next, with the run's root for URL.
    """
    if wants_rules + wants_dashboard + (out is not None) > 1:
        raise InvalidInputError("--rules, --dashboard and --out are three answers.", hint="Give one of them.")
    if not 0 < orphan_gib <= MAX_BYTES / GIB:
        raise InvalidInputError(
            f"--orphan-gib must be above 0 and at most {MAX_BYTES // GIB}, not {orphan_gib!r}.",
            hint="Give such a number of GiB.",
        )
    at = Thresholds(
        recovery_point_seconds=recovery_point_seconds,
        verified_point_seconds=verified_point_seconds,
        proved_point_seconds=proved_point_seconds,
        commit_lag_seconds=commit_lag_seconds,
        busy_seconds=busy_seconds,
        orphan_bytes=round(orphan_gib * GIB),
        for_seconds=for_seconds,
    )
    board = json.dumps(dashboard(), indent=2) + "\n"
    if out is not None:
        if not os.path.isdir(out):  # noqa: PTH112  (an empty text is none either)
            raise InvalidInputError(f"{out!r} is no folder.", hint=HINT)
        write_whole(Path(out, RULES), rules(at).encode())
        write_whole(Path(out, DASHBOARD), board.encode())
    else:
        _print(board if wants_dashboard else rules(at))
    return Exit.FINE


def _print(text: str) -> None:
    for line in text.splitlines():
        print_line(line)
