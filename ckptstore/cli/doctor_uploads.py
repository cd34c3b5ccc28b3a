"""`doctor --uploads`: what was begun and never ended, and its removal."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

import typer

from ckptstore.cli.access import log_options, pointed
from ckptstore.cli.documents import Document
from ckptstore.cli.exits import Exit, exit_for
from ckptstore.cli.render import clean, print_json, print_line, print_table, print_warning
from ckptstore.errors import CkptStoreError, InvalidInputError
from ckptstore.maintenance.uploads import Found, Uploads, abort, find_uploads
from ckptstore.objectstore.port import ObjectStore, PendingUpload
from ckptstore.units import counted

Ended = Mapping[PendingUpload, CkptStoreError | None]

_DURATION = re.compile(r"([0-9]{1,6})(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Return the seconds of `90s`, `30m`, `24h`, `7d`.

    Raises:
        InvalidInputError: It is none of these.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidInputError(f"{text!r} is no length of time.", hint="Write 90s, 30m, 24h or 7d.")
    return float(int(match[1]) * _SECONDS[match[2]])


def tell_uploads(store: ObjectStore, *, older_than: float, aborts: bool, living: bool, ask: bool, as_json: bool) -> int:
    """List the incomplete uploads, abort those that may be, if asked to, and return the exit code.

    Args:
        store: Where.
        older_than: Only what is older than so many seconds is aborted.
        aborts: Whether anything is.
        living: Also what may have a living writer.
        ask: Ask a person first.
        as_json: Print a document.

    Raises:
        InvalidInputError: Nobody is there to be asked.
        CkptStoreError: See `find_uploads`.

    If killed: some are gone, the others are there.
    """
    uploads = find_uploads(store, log_options=log_options())
    chosen = uploads.abortable(older_than_seconds=older_than, living=living)
    if aborts and chosen and ask:
        if as_json or not sys.stdin.isatty():
            raise InvalidInputError("Nobody is there to confirm it.", hint="Add --yes. Nothing was aborted.")
        _print_uploads(uploads, {})
        for each in chosen:
            print_line(f"would be aborted: {each.upload.key}")
        if not typer.confirm(f"Abort {counted(len(chosen), 'upload')} of {clean(uploads.url)}?", err=True):
            print_line("Nothing was aborted.")
            return Exit.STOPPED
    ended = {each.upload: error for each, error in abort(store, chosen if aborts else [])}
    if as_json:
        print_json(_document(uploads, chosen, ended, older_than))
    else:
        _print_uploads(uploads, ended)
        _print_outcome(uploads, chosen, ended, aborts=aborts)
    return max((exit_for(error) for error in ended.values() if error is not None), default=Exit.FINE)


def _document(uploads: Uploads, chosen: list[Found], ended: Ended, older_than: float) -> Document:
    def one(each: Found) -> Document:
        began, error = each.upload.began, ended.get(each.upload)
        return {
            "key": each.upload.key,
            "upload_id": each.upload.upload_id,
            "began": None if began is None else datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
            "age_seconds": None if each.age_seconds is None else round(each.age_seconds, 1),
            "state": each.state,
            "why": each.why,
            "attempt": None if each.stem is None else str(each.stem),
            "may_be_aborted": each in chosen,
            "aborted": each.upload in ended and error is None,
            "error": None if error is None else error.code,
        }

    return {
        "url": uploads.url,
        "engine": uploads.engine,
        "run": uploads.run,
        "clock": "store" if uploads.by_store else "this machine",
        "older_than_seconds": older_than,
        "uploads": [one(each) for each in uploads.found],
    }


def _print_uploads(uploads: Uploads, ended: Ended) -> None:
    print_line(f"{uploads.url}  (engine {uploads.engine})")
    print_line()
    if not uploads.found:
        print_line("No upload is incomplete.")
        return
    rows = [
        (_age(each.age_seconds), each.state, _fate(each, ended), each.upload.key, each.why) for each in uploads.found
    ]
    print_table(("AGE", "STATE", "DONE", "KEY", "WHY"), rows, right=("AGE",))
    if not uploads.by_store:
        print_warning("Nothing may be written here: the ages are by this machine's clock.")


def _print_outcome(uploads: Uploads, chosen: list[Found], ended: Ended, *, aborts: bool) -> None:
    if not uploads.found:
        return
    print_line()
    if not aborts:
        print_line(f"{len(chosen)} of {len(uploads.found)} would be aborted by --abort.")
        return
    failed = [error for error in ended.values() if error is not None]
    print_line(f"{len(ended) - len(failed)} of {len(uploads.found)} were aborted.")
    if failed:
        print_warning(f"{len(failed)} could not be aborted: {failed[0].message} {pointed(failed[0].hint)}")


def _fate(each: Found, ended: Ended) -> str | None:
    if each.upload not in ended:
        return None
    return "aborted" if ended[each.upload] is None else "FAILED"


def _age(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    unit = next(unit for unit in ("d", "h", "m", "s") if seconds >= 2 * _SECONDS[unit] or unit == "s")
    return f"{seconds / _SECONDS[unit]:.0f} {unit}"
