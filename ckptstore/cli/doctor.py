"""`doctor`: what a bucket, these credentials and this network can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, cast, get_args

import typer

from ckptstore.cli.access import log_options, pointed, said
from ckptstore.cli.arguments import AsJson, Url
from ckptstore.cli.doctor_documents import report_document
from ckptstore.cli.doctor_tables import print_report
from ckptstore.cli.doctor_uploads import duration, tell_uploads
from ckptstore.cli.exits import Exit, exit_for
from ckptstore.cli.render import print_json, print_note, status_of
from ckptstore.errors import InvalidInputError
from ckptstore.maintenance.behaviour import PART_BYTES
from ckptstore.maintenance.doctor import Scope, examine
from ckptstore.maintenance.policy import bucket_policy
from ckptstore.maintenance.report import Check, Report, Role
from ckptstore.nearest import meant
from ckptstore.objectstore.bucket import bucket_settings
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.urls import open_store
from ckptstore.options import RetryOptions, TransferOptions

IMPATIENT = TransferOptions(part_bytes=PART_BYTES, retry=RetryOptions(attempts=2, stall_timeout_seconds=10.0))
"""Parts of which two are uploaded, and tries that soon come to an end: whoever asks is waiting."""

WORST_FIRST = (Exit.UNSUPPORTED, Exit.STORE, Exit.BAD)
"""What a report exits with: the first of these that one of its failures has."""


EVERYBODY = "all"

POLICY_NOTES = """This was only printed; nothing was changed. Before you set it:
- Replace ACCOUNT_ID, READER, TRAINER and COLLECTOR by your own; outside of the main partition also arn:aws.
- A bucket has one policy: merge these statements into the one that it has (`aws s3api get-bucket-policy`).
- Nobody, whatever else allows it, may change or delete run.json and log/ then. To delete a whole run, take the two
  Deny statements out first. They do not hold against lifecycle rules: `ckptstore doctor URL` looks at those.
- With aws:kms, a role needs kms:Decrypt, and to write kms:GenerateDataKey, of that key."""


def doctor(  # noqa: PLR0913  (an option each)
    url: Url,
    *,
    role: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="ROLE",
            help="Whose needs count: reader (nothing is written), trainer, collector.  [default: trainer]",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out large uploads and the network's speed.")] = False,
    uploads: Annotated[bool, typer.Option("--uploads", help="List uploads that never ended, instead.")] = False,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="With --abort: how old at least, 90s, 30m, 24h, 7d.  [default: 24h]"),
    ] = None,
    aborts: Annotated[bool, typer.Option("--abort", help="With --uploads: abort those that are dead.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --abort: do not ask.")] = False,
    living: Annotated[
        bool, typer.Option("--all", help="With --abort: also those whose attempt may still commit.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(metavar="ROLE", help="Print an S3 bucket policy for reader, trainer, collector or all, instead."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Tell what a bucket, credentials and network can do.

    It tries everything out with objects of its own under probe/ of the run's root, which it deletes again, also after
    Ctrl-C. It never makes a bucket or a run. The network's speed takes up to 20 seconds and 220 MiB each way.

    It exits with 6 if a job would be refused here because of the store or its settings, else with 4 if a permission is
    missing that the role needs, else with 1 if the run here is damaged, else with 0, warnings or not. A store that
    cannot be reached at all ends it at once with that error.

    --uploads lists what was begun and never ended: multipart uploads, and of files the temporaries that killed writers
    left. Dead is what can never become a part of a checkpoint: its term is fenced, or a later attempt has committed.
    --abort removes the dead ones that are older than --older-than by the store's clock. What the newest job may still
    be writing stays, unless --all is given: stop that job first.

    --policy prints the least that each role needs, as a bucket policy, and sets nothing: the log may only be created,
    by nobody changed or deleted; hints may be overwritten; a trainer writes data, a collector deletes it.
    """
    _refuse_mixtures(
        {"--for": role is not None, "--quick": quick},
        {"--uploads": uploads},
        {"--older-than": older_than is not None, "--abort": aborts, "--yes": yes, "--all": living},
        {"--policy": policy is not None},
    )
    if policy is not None:
        print_json(bucket_policy(_opened(url).url, get_args(Role) if policy == EVERYBODY else [_role(policy)]))
        for line in pointed(POLICY_NOTES).splitlines():
            print_note(line)
        return Exit.FINE
    if uploads:
        older = duration(older_than or "24h")
        return tell_uploads(_opened(url), older_than=older, aborts=aborts, living=living, ask=not yes, as_json=as_json)
    return _examine(url, Scope(_role(role or "trainer"), multipart=not quick, network=not quick), as_json=as_json)


def _examine(url: str, scope: Scope, *, as_json: bool) -> int:
    store = _opened(url)
    with status_of("asking the store", wanted=not as_json) as status:
        report = examine(
            store,
            scope=scope,
            again=lambda: _opened(url),
            settings=lambda: bucket_settings(store.url, storage_options=said().storage_options, transfer=IMPATIENT),
            log_options=log_options(),
            watch=lambda event: None if isinstance(event, Check) else status(f"{event.group}: {event.name}"),
        )
    if as_json:
        print_json(report_document(report))
    else:
        print_report(report)
    return _exit_of(report)


def _refuse_mixtures(
    examining: Mapping[str, bool], uploads: Mapping[str, bool], aborting: Mapping[str, bool], policy: Mapping[str, bool]
) -> None:
    """Check that the options belong together.

    Raises:
        InvalidInputError: Two of them do not; they are named.
    """

    def first(options: Mapping[str, bool]) -> str | None:
        return next((name for name, given in options.items() if given), None)

    given = [name for name in (first(examining), first(uploads), first(policy)) if name is not None]
    if len(given) > 1:
        raise InvalidInputError(f"{given[0]} and {given[1]} contradict each other.", hint="Give one of them.")
    if first(aborting) is not None and not first(uploads):
        raise InvalidInputError(f"{first(aborting)} comes with --uploads.", hint="Add --uploads, or leave it out.")
    if first({name: on for name, on in aborting.items() if name in ("--yes", "--all")}) and not aborting["--abort"]:
        raise InvalidInputError("--yes and --all come with --abort.", hint="Add --abort, or leave them out.")


def _role(name: str) -> Role:
    if name not in get_args(Role):
        raise InvalidInputError(
            f"{name!r:.80} is no role.{meant(name, get_args(Role))}", hint=f"Use one of: {', '.join(get_args(Role))}."
        )
    return cast("Role", name)


def _opened(url: str) -> ObjectStore:
    return open_store(url, engine=said().engine, storage_options=said().storage_options, transfer=IMPATIENT)


def _exit_of(report: Report) -> Exit:
    found = {exit_for(check.error) for check in report.failed if check.error is not None}
    return next((code for code in WORST_FIRST if code in found), max(found, default=Exit.FINE))
