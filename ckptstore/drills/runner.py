"""Drills, one after the other: a run of its own for each, a time limit, and nothing left behind."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptstore.clock import IdSource, SystemIds
from ckptstore.drills.place import DRILL_SECONDS, IMPATIENT, CannotStart, NotApplicable, NotAsPromised, Place
from ckptstore.drills.scratch import Scratch, abandoned
from ckptstore.drills.verdict import Drill, Verdict
from ckptstore.errors import CkptStoreError, InvalidInputError, UnsupportedError
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.prefixed import PrefixedStore
from ckptstore.protocol.capable import require_capable

NEEDED = ("torch", "safetensors", "yaml")
NO_TORCH = "Run: python -c 'import torch'; and install it anew."
LAST_WORDS_SECONDS = 10.0
"""How long a drill that is out of time may take to notice that its ranks are dead."""


@dataclass(frozen=True, slots=True)
class Conduct:
    """How drills are run.

    Args:
        engine: What moves the bytes.
        storage_options: Of the engine.
        timeout_seconds: Of each drill.
        keeps: Whether what they wrote stays, to be looked at.
        prepare: See `Place`.
    """

    engine: str | None = None
    storage_options: Mapping[str, object] = field(default_factory=dict)
    timeout_seconds: float = DRILL_SECONDS
    keeps: bool = False
    prepare: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """How drills ended.

    Args:
        url: The root that they were run beside, without secrets.
        engine: What moved the bytes.
        verdicts: In the order in which they were run.
        refusal: Why the store may not be written to at all, or why no rank can start.
        scratch: Where they wrote.
        left_behind: Keys that are there still, because they could not be deleted or were to be kept.
        removed: What killed drills had left and is gone now.
        seconds: How long it took.
    """

    url: str
    engine: str
    verdicts: Mapping[str, Verdict]
    refusal: UnsupportedError | None = None
    scratch: str = ""
    left_behind: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def failed(self) -> list[str]:
        """The drills of which something did not hold."""
        return [name for name, verdict in self.verdicts.items() if verdict.status == "failed"]


Watch = Callable[[Drill, Verdict | None], None]
"""Told of every drill when it begins, with None, and when it has ended."""


def unwatched(drill: Drill, verdict: Verdict | None) -> None:
    """Watch nothing."""


def run_drills(
    url: str,
    drills: Sequence[Drill],
    *,
    conduct: Conduct | None = None,
    watch: Watch = unwatched,
    ids: IdSource | None = None,
) -> Report:
    """Run drills beside the run at `url`, which they neither read nor change.

    Raises:
        UnsupportedError: What drills need is not installed.
        InvalidInputError: The URL or an option is wrong, or ranks cannot share such a store.
        UnavailableError: The store does not answer. AccessDeniedError: it refuses.

    If killed: objects under `drill/`, which the next drill removes. The ranks end by themselves.
    """
    conduct, ids = conduct or Conduct(), ids or SystemIds()
    check_installed()
    store = open_store(url, engine=conduct.engine, storage_options=conduct.storage_options, transfer=IMPATIENT)
    if store.engine == "memory" or store.url.startswith("memory:"):
        raise InvalidInputError(
            f"{store.url} is the memory of one process, and drills start several.",
            hint="Run them on a path, or on s3://.",
        )
    began = time.monotonic()
    scratch = Scratch.begin(store, ids=ids)
    left: tuple[str, ...] = ()
    try:
        removed = tuple(dead.url for dead in abandoned(store, now=scratch.began()) if not dead.clean())
        verdicts, refusal = _run(store, scratch, drills, conduct, ids=ids, watch=watch, root=url)
        if conduct.keeps:
            scratch.keep()
    finally:
        left = (scratch.url,) if conduct.keeps else _clean_even_if_interrupted(scratch)
    return Report(
        store.url, store.engine, verdicts, refusal, scratch.url, left, removed, round(time.monotonic() - began, 3)
    )


def _run(  # noqa: PLR0913  (one half of `run_drills`)
    store: ObjectStore,
    scratch: Scratch,
    drills: Sequence[Drill],
    conduct: Conduct,
    *,
    ids: IdSource,
    watch: Watch,
    root: str,
) -> tuple[dict[str, Verdict], UnsupportedError | None]:
    verdicts: dict[str, Verdict] = {}
    refusal = _refusal(PrefixedStore(store, scratch.prefix), ids)
    scheme = store.url.partition("://")[0]
    for drill in drills:
        watch(drill, None)
        if refusal is not None:
            verdict = Verdict("refused", refusal.message)
        elif scheme in drill.not_on:
            verdict = Verdict("not applicable", drill.not_on[scheme])
        else:
            verdict = _ended(drill, _place(f"{root.rstrip('/')}/{scratch.prefix}{drill.name}", conduct), conduct)
            if verdict.status == "refused":  # as it would be in every other drill
                refusal = UnsupportedError(verdict.seen, hint=NO_TORCH)
        verdicts[drill.name] = verdict
        watch(drill, verdict)
    return verdicts, refusal


def _ended(drill: Drill, place: Place, conduct: Conduct) -> Verdict:
    """Run one drill in a thread of its own, so that neither it nor an interrupt is waited for without end."""
    began, verdicts = time.monotonic(), list[Verdict]()
    thread = threading.Thread(
        target=lambda: verdicts.append(verdict_of(drill, place)), name=f"ckptstore-{drill.name}", daemon=True
    )
    try:
        thread.start()
        thread.join(conduct.timeout_seconds)
        late = thread.is_alive()
    finally:
        place.close()
        if thread.ident is not None:
            thread.join(LAST_WORDS_SECONDS)  # its ranks are dead
    verdict = Verdict("failed", f"It did not end within {conduct.timeout_seconds:g} s.") if late else verdicts[0]
    return replace(verdict, seconds=round(time.monotonic() - began, 3))


def verdict_of(drill: Drill, place: Place) -> Verdict:
    """Run a drill and return its verdict. It raises nothing: what goes wrong in a drill is what it is about."""
    try:
        return Verdict("passed", drill.run(place))
    except NotApplicable as reason:
        return Verdict("not applicable", str(reason))
    except CannotStart as reason:
        return Verdict("refused", str(reason))
    except NotAsPromised as broken:
        return Verdict("failed", str(broken))
    except CkptStoreError as error:
        return Verdict("failed", f"{type(error).__name__}: {error.message}")
    except Exception as fault:  # noqa: BLE001  (the drill itself is broken: that is no pass)
        return Verdict("failed", f"The drill itself failed: {type(fault).__name__}: {fault}")


def _place(url: str, conduct: Conduct) -> Place:
    until = time.monotonic() + conduct.timeout_seconds
    return Place(url, conduct.engine, conduct.storage_options, conduct.prepare, until)


def _refusal(store: ObjectStore, ids: IdSource) -> UnsupportedError | None:
    try:
        require_capable(store, ids)
    except UnsupportedError as error:
        return error
    return None


def _clean_even_if_interrupted(scratch: Scratch) -> tuple[str, ...]:
    try:
        return scratch.clean()
    except KeyboardInterrupt:
        scratch.clean()
        raise


def check_installed() -> None:
    """Check that what drills stand on is there.

    Raises:
        UnsupportedError: It is not; what to install is said.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"Drills train for real, and need {', '.join(missing)}, which is not installed.",
            hint="Run: pip install 'ckptstore[training]'.",
            missing=missing,
        )
