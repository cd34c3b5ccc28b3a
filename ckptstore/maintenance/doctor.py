"""What a bucket, these credentials and this network can do: asked by doing it, told as plain values.

Everything that is written lies in a place of its own under `probe/` of the run's root and is deleted at the end. No
bucket is ever created, and no run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from ckptstore.clock import Clock, IdSource, SystemClock, SystemIds
from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.seal import signer_of
from ckptstore.maintenance import permissions
from ckptstore.maintenance.behaviour import check_clock, check_deleting, check_reading, check_upload, check_writing
from ckptstore.maintenance.report import Check, Report, Role, Watch, fine, unwatched
from ckptstore.maintenance.settings import judge_settings
from ckptstore.maintenance.throughput import check_throughput
from ckptstore.maintenance.visit import Visit
from ckptstore.objectstore.bucket import BucketSettings
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import LogOptions, check_flags
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.lost import check_not_lost
from ckptstore.units import counted

ONLY_WRITERS_NEED = {
    ("store", name)
    for name in ("create once", "create once in a race", "overwrite", "multipart upload", "abort upload", "delete")
}
"""Checks that a run can be read without."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What is asked.

    Args:
        role: Whose needs decide what is a failure. For a `reader` nothing is written.
        multipart: Move a large object, in parts: 12 MiB, twice.
        network: Measure how fast it is.

    Raises:
        InvalidInputError: There is no such role.
    """

    role: Role = "trainer"
    multipart: bool = True
    network: bool = True

    def __post_init__(self) -> None:
        check_flags(multipart=self.multipart, network=self.network)
        if self.role not in get_args(Role):
            raise InvalidInputError(f"{self.role!r:.80} is no role.", hint=f"Use {', '.join(get_args(Role))}.")


def examine(  # noqa: PLR0913  (what an examination is made of)
    store: ObjectStore,
    *,
    scope: Scope | None = None,
    again: Callable[[], ObjectStore] | None = None,
    settings: Callable[[], BucketSettings | None] | None = None,
    watch: Watch = unwatched,
    log_options: LogOptions | None = None,
    clock: Clock | None = None,
    ids: IdSource | None = None,
) -> Report:
    """Return what `store`, its credentials and the network to it can do.

    Args:
        store: Rooted at a run's root. Best opened with parts of at most `behaviour.PART_BYTES`, so that an upload of
            12 MiB takes two, and with little patience.
        scope: What is asked.
        again: Opens the same place once more, with a client of its own; by default `store` is asked twice.
        settings: Asks for the bucket's settings; see `objectstore.bucket`. Without it they are not looked at.
        watch: Told of every check.
        log_options: How the log is read: who must have signed it.
        clock: This machine's.
        ids: Where the place under `probe/` gets its name.

    Raises:
        AccessDeniedError: Nothing at all is allowed.
        InvalidInputError: There is no such bucket.
        UnavailableError: The store does not answer, or stopped answering.

    If killed: small objects, at most those of one measurement, under `probe/`, which nobody reads. After an interrupt
    they are deleted.
    """
    scope, clock = scope or Scope(), clock or SystemClock()
    visit = Visit(store, clock=clock, ids=ids or SystemIds(), watch=watch)
    began = clock.monotonic()
    left: tuple[str, ...] = ()
    try:
        check_reading(visit, writes=scope.role != "reader")
        _check_run(visit, log_options)
        _check_settings(visit, settings)
        if scope.role != "reader":
            check_writing(visit, again or (lambda: store))
            check_clock(visit)
            if scope.multipart:
                check_upload(visit)
            else:
                visit.may_list_uploads()
            check_deleting(visit)
            if scope.network:
                check_throughput(visit)
    finally:
        left = visit.leave_even_if_interrupted()
    for check in permissions.judge(visit.store, scope.role):
        visit.tell(check)
    return Report(
        url=store.url,
        engine=store.engine,
        role=scope.role,
        checks=tuple(visit.checks),
        roles=_roles(visit),
        left_behind=left,
        bytes_sent=visit.store.sent,
        bytes_received=visit.store.received,
        seconds=round(clock.monotonic() - began, 3),
    )


def _roles(visit: Visit) -> Mapping[Role, bool | None]:
    """Return for whom the place is fit: who is permitted enough, unless something does not work that the role needs."""
    broken = [check for check in visit.checks if check.verdict == "failed" and check.group != "permission"]
    reads = any((check.group, check.name) not in ONLY_WRITERS_NEED for check in broken)
    fits = {"reader": not reads, "trainer": not broken, "collector": not broken}
    return {role: fits[role] and permitted for role, permitted in permissions.roles_of(visit.store).items()}


def _check_settings(visit: Visit, settings: Callable[[], BucketSettings | None] | None) -> None:
    """Ask what the bucket is set to, if there is one and it is asked for."""
    if settings is not None:
        visit.begin("bucket", "settings")
        found = settings()
        for check in judge_settings(found) if found is not None else ():
            visit.tell(check)


def _check_run(visit: Visit, options: LogOptions | None) -> None:
    """Read the run at the root, if there is one."""
    opened: list[RunLog] = []

    def read() -> Check:
        log = RunLog.open(visit.store, clock=visit.clock, ids=visit.ids, options=options)
        opened.append(log)
        end = log.fold.whole().end
        if log.lost_from is not None:
            raise IntegrityError(
                f"The log's tail was lost: latest.json names slot {log.lost_from}, the log ends before slot {end}.",
                hint="Save nothing; restore the log's objects from a backup or earlier versions.",
                lost_from=log.lost_from,
            )
        check_not_lost(log)
        if log.run is None:
            return fine("run", "log", "There is no run here yet.")
        return fine("run", "log", f"The log is whole and ends before slot {end}.", value=end)

    visit.look("run", "log", read)
    if opened and opened[0].run is not None:
        visit.tell(_claim(opened[0]))
        visit.look("run", "signature", lambda: _signature(opened[0]))


def _signature(log: RunLog) -> Check:
    """Tell who signed the newest record."""
    end, signing = log.fold.end, log.options.signing
    signers = [signer_of(entry.body) for entry in log.records(start=max(0, end - 1), end=end)]
    signer = signers[0] if signers else None
    if signer is None:
        return fine("run", "signature", "The newest record is not signed." if signers else "There is no record yet.")
    trusted = signing is not None and signing.requires(end - 1)
    told = "is trusted" if trusted else "was not checked: no trusted key was named"
    return Check(
        "run", "signature", "ok", f"{signer} signed the newest record, which {told}.", facts={"signed_by": signer}
    )


def _claim(log: RunLog) -> Check:
    reign, loadable = log.fold.claim, len(log.fold.selectable)
    if reign is None:
        return fine("run", "claim", "Nobody has claimed this run yet.")
    who = f"Job {reign.job} on {reign.host} holds it since {reign.written_at} (term {reign.term})"
    since = log.fold.tip is not None
    return Check(
        "run",
        "claim",
        "ok" if since else "warning",
        f"{who}; {counted(loadable, 'checkpoint')} may be loaded." if since else f"{who}; claimed, no commit since.",
        hint="" if since else "Whoever held it before is fenced. If this job is not saving, stop it and start yours.",
        facts={
            "term": reign.term,
            "job": reign.job,
            "host": reign.host,
            "claimed_at": reign.written_at,
            "committed_since": since,
        },
    )
