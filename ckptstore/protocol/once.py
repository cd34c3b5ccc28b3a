"""`create_once`: the one primitive by which anything is decided."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ckptstore.clock import Clock, IdSource
from ckptstore.errors import AlreadyExistsError, CkptStoreError, IntegrityError, OutcomeUnknownError, UnavailableError
from ckptstore.format.records import MAX_RECORD_BYTES
from ckptstore.objectstore.patience import asked_pause
from ckptstore.objectstore.port import ObjectStore, PutMode
from ckptstore.options import LogOptions
from ckptstore.protocol.reading import get_if_there

MAX_PAUSE_SECONDS = 5.0


class Outcome(Enum):
    """What became of a `create_once`."""

    CREATED = "created"
    MINE = "mine"
    OTHER = "other"
    UNKNOWN = "unknown"


def create_once(  # noqa: PLR0913  (what the log is made of, handed on)
    store: ObjectStore,
    key: str,
    body: bytes,
    *,
    clock: Clock,
    ids: IdSource,
    options: LogOptions,
    same: Callable[[bytes], bool] | None = None,
) -> tuple[Outcome, bytes | None]:
    """Create `key` with `body` if nobody else has, and say what is known of it.

    On anything but success the key is read back, because clients retry underneath: our own landed write comes back as
    "already exists" (I5). Where it is provably absent, the same bytes are sent again (I16).

    Args:
        store: Where.
        key: What to create.
        body: Made once; never made anew for another try.
        clock: For the pauses and the deadline.
        ids: For the jitter.
        options: The deadline, and whether a single writer is promised.
        same: Says whether other bytes are ours all the same: a record that names our own attempt.

    Returns:
        The outcome, and the bytes that stand there (None if that is not known).

    Raises:
        CkptStoreError: The store refused, and it provably did not happen: `UnavailableError`, `AccessDeniedError`, ...

    If killed: the key holds the whole body or does not exist; a request under way may still land.
    """
    deadline, pause = clock.monotonic() + options.deadline_seconds, options.request_pause_seconds
    ambiguous = False
    while True:
        refusal: CkptStoreError | None = None
        try:
            if _send(store, key, body, options):
                return Outcome.CREATED, body
        except UnavailableError as error:
            refusal = error
        except (AlreadyExistsError, OutcomeUnknownError):
            ambiguous = True
        except CkptStoreError as error:
            refusal = error
        except Exception:  # noqa: BLE001  (not understood, so nothing is known of it)
            ambiguous = True
        told, holder = read_back(store, key, max_bytes=max(len(body), MAX_RECORD_BYTES))
        if holder is not None:
            mine = holder == body or (same is not None and same(holder))
            return (Outcome.MINE if mine else Outcome.OTHER), holder
        expired = clock.monotonic() >= deadline
        if told and refusal is not None and not ambiguous and (expired or not isinstance(refusal, UnavailableError)):
            raise refusal
        if expired:  # a request may still be under way: only a slot that somebody holds says "did not happen" (I5)
            return Outcome.UNKNOWN, None
        drawn = max(pause * ids.fraction(), asked_pause(refusal, MAX_PAUSE_SECONDS))
        clock.sleep(min(drawn, max(0.0, deadline - clock.monotonic())))  # the last try is at the deadline
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
        ambiguous = ambiguous or not told


def _send(store: ObjectStore, key: str, body: bytes, options: LogOptions) -> bool:
    """Send once. True: created. False: look what is there."""
    if not options.assume_single_writer:
        store.put(key, body, mode=PutMode.CREATE)
        return True
    if get_if_there(store, key, max_bytes=max(len(body), MAX_RECORD_BYTES)) is None:
        store.put(key, body)
    return False


def read_back(store: ObjectStore, key: str, *, max_bytes: int = MAX_RECORD_BYTES) -> tuple[bool, bytes | None]:
    """Return whether the store told, and what stands under `key` (None: provably absent, if it told).

    Raises:
        IntegrityError: What stands there is longer than anything that was ever written there.
    """
    try:
        return True, get_if_there(store, key, max_bytes=max_bytes)
    except IntegrityError:
        raise
    except Exception:  # noqa: BLE001  (a refusal or a time-out is never "absent")
        return False, None
