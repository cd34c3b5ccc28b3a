"""`doctor`: what a bucket, these credentials and this network can do."""

from __future__ import annotations

from typing import Annotated, cast, get_args

import typer

from ckptstore.cli.access import said
from ckptstore.cli.arguments import AsJson, Url
from ckptstore.cli.doctor_documents import report_document
from ckptstore.cli.doctor_tables import print_report
from ckptstore.cli.exits import Exit, exit_for
from ckptstore.cli.render import print_json, status_of
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.behaviour import PART_BYTES
from ckptstore.maintenance.doctor import Scope, examine
from ckptstore.maintenance.report import Check, Report, Role
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions

IMPATIENT = TransferOptions(part_bytes=PART_BYTES, retry=RetryOptions(attempts=3, deadline_seconds=20.0))
"""Parts of which two are uploaded, and tries that soon come to an end: whoever asks is waiting."""

WORST_FIRST = (Exit.UNSUPPORTED, Exit.STORE, Exit.BAD)
"""What a report exits with: the first of these that one of its failures has."""


def doctor(
    url: Url,
    *,
    role: Annotated[
        str,
        typer.Option(
            "--for", metavar="ROLE", help="Whose needs count: reader (nothing is written), trainer, collector."
        ),
    ] = "trainer",
    quick: Annotated[bool, typer.Option("--quick", help="Leave out large uploads and the network's speed.")] = False,
    as_json: AsJson = False,
) -> int:
    """Tell what this bucket, these credentials and this network can do.

    It tries everything out with objects of its own under probe/ of the run's root, which it deletes again, also after
    Ctrl-C. It never makes a bucket or a run. The network's speed takes up to 20 seconds and 220 MiB each way.

    It exits with 6 if a job would be refused here because of the store or its
    settings, else with 4 if a permission is missing that the role needs, else with 1 if the run here is damaged, else
    with 0, warnings or not. A store that cannot be reached at all ends it at once with that error.
    """
    if role not in get_args(Role):
        raise InvalidInputError(f"{role!r} is no role.", hint=f"Use one of: {', '.join(get_args(Role))}.")
    store = _opened(url)
    with status_of("asking the store", wanted=not as_json) as status:
        report = examine(
            store,
            scope=Scope(role=cast("Role", role), quick=quick),
            again=lambda: _opened(url),
            watch=lambda event: None if isinstance(event, Check) else status(f"{event.group}: {event.name}"),
        )
    if as_json:
        print_json(report_document(report))
    else:
        print_report(report)
    return _exit_of(report)


def _opened(url: str) -> ObjectStore:
    return open_store(url, engine=said().engine, storage_options=said().storage_options, transfer=IMPATIENT)


def _exit_of(report: Report) -> Exit:
    found = {exit_for(check.error) for check in report.failed if check.error is not None}
    return next((code for code in WORST_FIRST if code in found), max(found, default=Exit.FINE))
