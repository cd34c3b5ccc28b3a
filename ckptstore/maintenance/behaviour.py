"""How a store behaves: each thing that the protocol relies on, asked of it by doing it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    UnsupportedError,
)
from ckptstore.maintenance.report import Check
from ckptstore.maintenance.visit import Visit
from ckptstore.objectstore.port import ObjectStore, PendingUpload, PutMode
from ckptstore.objectstore.probe import check_absence, check_race, check_second_create
from ckptstore.units import KIB, MIB, format_bytes

OBJECT_BYTES = 4 * KIB
RANGE_START, RANGE_BYTES = 1_000, 1_500
UPLOAD_BYTES, PART_BYTES = 12 * MIB, 8 * MIB
"""What is uploaded. Open the store with parts of `PART_BYTES` at most, so that it takes two."""
NO_UPLOAD = "0" * 32
CLOCK_WARNING_SECONDS = 300.0
CLOCK_REFUSED_SECONDS = 900.0


def check_reading(visit: Visit, *, writes: bool) -> None:
    """Look whether an absent key reads as absent, and whether listing is allowed.

    Raises:
        AccessDeniedError: Nothing at all is allowed: these are the wrong credentials.
        CkptStoreError: The store cannot be asked: no address, no bucket, no answer.
    """
    store, denied = visit.store, None
    visit.begin("store", "absent key")
    try:
        check_absence(store, visit.key("absent"))
    except UnsupportedError as error:
        denied = error.__cause__ if isinstance(error.__cause__, AccessDeniedError) else None
        absent = Check("store", "absent key", "failed", error.message, hint=error.hint, error=error)
    else:
        store.tells_absence = True
        absent = Check("store", "absent key", "ok", "An absent key reads as absent, not as denied.")
    try:
        list(store.list(visit.place))
    except AccessDeniedError:
        if denied is not None and not (writes and _may_create(visit)):
            raise denied from None
    visit.tell(absent)


def _may_create(visit: Visit) -> bool:
    try:
        visit.store.put(visit.key("first"), b"first", mode=PutMode.CREATE)
    except (AccessDeniedError, UnsupportedError):
        return False
    return True


def check_writing(visit: Visit, again: Callable[[], ObjectStore]) -> None:
    """Look at what a commit relies on, with small objects.

    Args:
        visit: Where.
        again: Opens the store once more.

    Raises:
        UnavailableError: The store went away.

    If killed: small objects in the visit's place, which nobody reads.
    """
    store, key = visit.store, visit.key("object")
    first, second = os.urandom(OBJECT_BYTES), os.urandom(OBJECT_BYTES)

    def create_once() -> str:
        check_second_create(store, visit.key("once"))
        return "A second create of a key fails and leaves the first."

    def race() -> str:
        check_race(store, visit.key("race"))
        return "Of racing creates of a key one stays, and at most one is told that it won."

    def read_back() -> str:
        _create(store, key, first)
        _expect(store, key, first, "What was just written")
        return "What was written is read back at once."

    def overwrite() -> str:
        store.put(key, second)
        _expect(store, key, second, "What was just overwritten")
        return "What was overwritten is read back at once."

    def listed() -> str:
        _expect_listed(store, visit.place, key)
        return "What was written is listed at once."

    def elsewhere() -> str:
        other = again()
        _expect_listed(other, visit.place, key)
        other.get(key, max_bytes=OBJECT_BYTES)
        return "Another client sees it at once, too."

    def ranged() -> str:
        whole = store.get(key, max_bytes=OBJECT_BYTES)
        piece = store.get_range(key, start=RANGE_START, length=RANGE_BYTES)
        if piece != whole[RANGE_START : RANGE_START + RANGE_BYTES]:
            raise _unfit(store, "a ranged read returned other bytes than the object has there", key)
        return "A ranged read returns exactly its bytes."

    visit.look("store", "create once", create_once)
    visit.look("store", "create once in a race", race)
    visit.look("store", "read back", read_back)
    visit.look("store", "overwrite", overwrite)  # which may be allowed where creating is not
    if key not in store.written:
        return  # there is nothing to look at
    visit.look("store", "list after write", listed)
    visit.look("store", "list by another client", elsewhere)
    visit.look("store", "ranged read", ranged)


def check_deleting(visit: Visit) -> None:
    """Look whether what is deleted is gone.

    Raises:
        UnavailableError: The store went away.

    If killed: a small object in the visit's place.
    """
    store, key = visit.store, visit.key("object")

    def delete() -> str:
        store.delete(key)
        try:
            store.get(key, max_bytes=OBJECT_BYTES)
        except NotFoundError:
            pass
        else:
            raise _unfit(store, "an object that was just deleted is still read", key)
        if key in [info.key for info in store.list(visit.place)]:
            raise _unfit(store, "an object that was just deleted is still listed", key)
        return "What was deleted is gone at once."

    if key in store.written:
        visit.look("store", "delete", delete)


def check_upload(visit: Visit) -> None:
    """Look whether a large object is moved whole, is invisible before its end, and can be given up.

    Raises:
        UnavailableError: The store went away.

    If killed: perhaps an incomplete upload in the visit's place.
    """
    store, key, lost = visit.store, visit.key("upload"), visit.key("given-up")

    def upload() -> str:
        body = os.urandom(UPLOAD_BYTES)
        with store.open_upload(key, size=UPLOAD_BYTES) as upload:
            upload.write(body[:PART_BYTES])
            if _is_there(store, key):
                raise _unfit(store, "an upload is visible before it is complete", key)
            upload.write(body[PART_BYTES:])
            upload.complete()
        across = PART_BYTES - KIB
        if store.head(key).size != UPLOAD_BYTES or (
            store.get_range(key, start=across, length=2 * KIB) != body[across : across + 2 * KIB]
        ):
            raise _unfit(store, "an upload in parts did not become the object that was sent", key)
        return f"{format_bytes(UPLOAD_BYTES)} in parts became one object, invisible before it was complete."

    def give_up() -> str | Check:
        body = os.urandom(UPLOAD_BYTES - 1)
        with store.open_upload(lost, size=UPLOAD_BYTES) as upload:
            upload.write(body)
            try:
                pending = _pending(visit, lost)
            except UnsupportedError as error:
                return Check("store", "abort upload", "unknown", str(error))  # its hint is for whoever looks for them
            for each in pending:
                store.abort_upload(each)
        if any(each in pending for each in store.list_uploads(visit.place)):
            raise _unfit(store, "an upload that was aborted is still listed", lost)
        if not pending:
            return Check("store", "abort upload", "unknown", "The service does not list an upload that is under way.")
        return "An upload that is given up leaves nothing."

    visit.look("store", "multipart upload", upload)
    if key in store.written:
        visit.look("store", "abort upload", give_up)


def _pending(visit: Visit, key: str) -> list[PendingUpload]:
    """Return the incomplete uploads of `key`. Where that is denied, at least see whether aborting is allowed."""
    try:
        return [each for each in visit.store.list_uploads(visit.place) if _begins(each.key, visit.place, key)]
    except AccessDeniedError:
        with contextlib.suppress(AccessDeniedError, UnsupportedError, InvalidInputError):
            visit.store.abort_upload(PendingUpload(key, NO_UPLOAD))  # to abort what is not there is no error
        raise


def check_clock(visit: Visit) -> None:
    """Compare the store's clock with this machine's.

    Raises:
        UnavailableError: The store went away.

    If killed: a small object in the visit's place.
    """
    visit.look("clock", "offset", lambda: _offset(visit))


def _offset(visit: Visit) -> Check:
    store, key = visit.store, visit.key("clock")
    began = visit.clock.now().timestamp()
    _create(store, key, b"clock")
    ended = visit.clock.now().timestamp()
    stored = store.head(key).modified
    if stored is None:
        return Check("clock", "offset", "unknown", "The store does not say when an object was written.")
    resolution = 1.0 if stored == int(stored) else 0.0
    low, high = stored - ended, stored + resolution - began
    offset, uncertainty = round((low + high) / 2, 3) + 0.0, round((high - low) / 2, 3)
    facts = {"uncertainty_seconds": uncertainty}
    told = f"The store's clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine's"
    told += f", give or take {uncertainty:.1f} s."
    if abs(offset) - uncertainty <= CLOCK_WARNING_SECONDS:
        return Check("clock", "offset", "ok", told, value=offset, unit="s", facts=facts)
    hint = f"Set the clock (`timedatectl`, chrony): at {CLOCK_REFUSED_SECONDS:.0f} s servers refuse every request."
    return Check("clock", "offset", "warning", told, hint=hint, value=offset, unit="s", facts=facts)


def _create(store: ObjectStore, key: str, body: bytes) -> None:
    try:
        store.put(key, body, mode=PutMode.CREATE)
    except (AlreadyExistsError, OutcomeUnknownError, UnsupportedError):
        store.put(key, body)  # nobody else uses this key: neither a lost reply nor a missing condition matters here


def _expect(store: ObjectStore, key: str, body: bytes, what: str) -> None:
    try:
        found = store.get(key, max_bytes=max(len(body), OBJECT_BYTES))
    except NotFoundError:
        raise _unfit(store, f"{what} reads as absent", key) from None
    if found != body:
        raise _unfit(store, f"{what} reads as something else", key)


def _expect_listed(store: ObjectStore, place: str, key: str) -> None:
    sizes = {info.key: info.size for info in store.list(place)}
    if sizes.get(key) != OBJECT_BYTES:
        raise _unfit(store, "what was just written is not listed", key)


def _is_there(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except NotFoundError:
        return False
    except CkptStoreError:
        return False  # absent, and denied as what is absent is: told by another check
    return True


def _begins(found: str, place: str, key: str) -> bool:
    """Say whether an upload is the one of `key`; of files it is called by its temporary."""
    return found == key or found.removeprefix(place).startswith(".")


def _unfit(store: ObjectStore, seen: str, key: str) -> UnsupportedError:
    return UnsupportedError(
        f"{store.url} is not consistent: {seen[0].lower()}{seen[1:]}.",
        hint="Switch off caches between here and the store; else use another store: checkpoints could be overlooked.",
        key=key,
    )
