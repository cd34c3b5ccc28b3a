"""`CkptStoreReader`: DCP's storage reader over committed checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptstore.clock import IdSource, SystemIds
from ckptstore.errors import CkptStoreError, IncompatibleStateError, InvalidInputError, NotFoundError
from ckptstore.events import Loaded, Observer, PassedOver, silent, tell
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import LogOptions, TransferOptions, check_flags, check_kinds, check_seconds
from ckptstore.protocol.catalog import Catalog, check_asked
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.parts import load_parts
from storage_writers import agreement, incarnations, ranks, survivors
from storage_writers.agreement import LONGEST_WORK_SECONDS
from storage_writers.loading import (
    Cast,
    Fetcher,
    Reads,
    check_dtypes,
    reads_of,
    telling_what_to_do,
    telling_what_was_filled,
)
from storage_writers.metadata import Contents, contents_of
from storage_writers.planning import plain_name
from storage_writers.roots import open_root

Asked = tuple[str | None, int | None, int | None]
EMPTY = Metadata({})
SCAN_SECONDS = 3600.0
"""How long a rank is waited for that verifies all it needs before it loads."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Args:
        checkpoint_id: The name of what was loaded.
        seq: Its position in the log.
        skipped: Keys of the checkpoint that no rank's target has (only with `allow_unexpected`).
        missing: Keys of this rank's target that the checkpoint lacks (only with `allow_missing`).
        cast: Tensors of this rank that have another dtype than was saved (only with `allow_cast`).
        bytes_fetched: By this rank, leaf tables included, headers and manifest excluded.
    """

    checkpoint_id: str
    seq: int
    skipped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    cast: tuple[Cast, ...] = ()
    bytes_fetched: int = 0


@dataclass(frozen=True)
class Choice:
    """What travels up in each rank's plan: which checkpoint it chose, and the keys of its target.

    `all_keys` is False if only those are known that need bytes: DCP plans no read for a tensor without elements.
    """

    seq: int
    blake3: str
    keys: frozenset[str]
    all_keys: bool


@dataclass(frozen=True)
class LoadTicket:
    """What travels down: under which name the ranks agree, and what nobody asked for."""

    load_id: str
    rank: int
    world_size: int
    skipped: tuple[str, ...]


class LoadSession(threading.local):
    """The load of each thread: DCP runs one from begin to end on one thread. Beside the reader only `calls.py` uses it.

    Args:
        allow_missing: The reader's.
        asked: Which checkpoint the reader was made for: name, step and seq.
    """

    def __init__(self, allow_missing: bool, asked: Asked) -> None:  # noqa: FBT001  (of one caller)
        self._given = allow_missing, asked
        self.allow_missing = allow_missing
        self.asked = asked
        self.begun = False
        self.ticket: LoadTicket | None = None
        self.begin()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._given

    def begin(self) -> None:
        """Let go of the checkpoint of the load before."""
        self.report: LoadReport | None = None
        self.run: str | None = None
        self.catalog: Catalog | None = None
        self.chosen: Committed | None = None
        self.contents = Contents(EMPTY)
        self.failure: Exception | None = None

    def forget(self) -> None:
        """Let go of the load before, so that `lost` speaks of nothing but the one that begins now."""
        self.ticket = None

    def lost(self) -> CkptStoreError | None:
        """Return what to raise when a collective of the load has failed; None if no rank was asked to read yet."""
        ticket = self.ticket
        if ticket is None or ticket.world_size == 1:
            return None
        peers = ranks.meet(ticket.rank, ticket.world_size, ticket.load_id)
        return survivors.lost_in_load(peers)


class CkptStoreReader(StorageReader):
    """Loads a committed checkpoint: the newest one, or the one that is asked for. Opening and loading write nothing.

    Threads may share one; a name that DCP was given counts on the thread that gave it.

    Args:
        url: Root of the run; or an open store.
        checkpoint_id: Its name, or `name@seq`. DCP's own argument of this name goes before.
        step: Its global step; of several the newest.
        seq: Its position in the log.
        only: Load nothing but these components or prefixes of keys, e.g. `("model",)`.
        allow_missing: Keys that the checkpoint lacks keep their values (with `storage_writers.load`; DCP's own planner
            has `allow_partial_load`).
        allow_unexpected: Keys that no rank asks for are left out.
        allow_cast: Tensors of another dtype are cast.
        allow_pickle: Values that were saved with `allow_pickle=True` are unpickled, which runs what they say.
        verify_first: Read everything twice, so that damage leaves the target untouched.
        engine: What moves the bytes, where a scheme has several: `obstore` or `s3fs` for `s3://`.
        storage_options: Of the store's engine.
        transfer: How bytes are moved.
        log: Who must have signed the run's records, in `signing`.
        agree_timeout_seconds: How long a rank that does not come is waited for.
        observer: Hears of the load, and of what is newer than the newest checkpoint and why that is not loaded; for
            this one rank lists all data of the run.

    Raises:
        InvalidInputError: An argument is outside of what is allowed.
    """

    def __init__(  # noqa: PLR0913  (a face takes written-out keywords)
        self,
        url: str | os.PathLike[str] | ObjectStore,
        *,
        checkpoint_id: str | None = None,
        step: int | None = None,
        seq: int | None = None,
        only: Sequence[str] | None = None,
        allow_missing: bool = False,
        allow_unexpected: bool = False,
        allow_cast: bool = False,
        allow_pickle: bool = False,
        verify_first: bool = False,
        engine: str | None = None,
        storage_options: Mapping[str, object] | None = None,
        transfer: TransferOptions | None = None,
        log: LogOptions | None = None,
        agree_timeout_seconds: float = 60.0,
        observer: Observer = silent,
    ) -> None:
        check_seconds(agree_timeout_seconds=agree_timeout_seconds)
        check_flags(allow_missing=allow_missing, allow_unexpected=allow_unexpected, allow_cast=allow_cast)
        check_flags(allow_pickle=allow_pickle, verify_first=verify_first)
        check_kinds(log=(log, LogOptions))
        check_asked(checkpoint_id, step, seq)
        self._log_options = log or LogOptions()
        self._transfer = transfer or TransferOptions()
        self._store = open_root(url, engine=engine, storage_options=storage_options, transfer=self._transfer)
        self._only = None if only is None else _checked_prefixes(only)
        self._session = LoadSession(allow_missing, (checkpoint_id, step, seq))
        self._allow_unexpected, self._allow_cast, self._allow_pickle = allow_unexpected, allow_cast, allow_pickle
        self._verify_first = verify_first
        self._seconds = agree_timeout_seconds
        self._observer = observer
        self._ids: IdSource = SystemIds()
        self._newest_report: LoadReport | None = None

    @property
    def report(self) -> LoadReport | None:
        """What the last load of this thread did, of all threads if it began none; None before it ended well."""
        return self._session.report if self._session.begun else self._newest_report

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the name of the next checkpoint to load."""
        if checkpoint_id is not None:
            self._session.asked = plain_name(checkpoint_id), None, None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Choose a checkpoint and return what it holds.

        DCP turns an error of this call into an AssertionError without a cause, so it is kept and raised by the next
        one. (No parameter may be called `kwargs`: DCP would call again, with `rank=`.)
        """
        load = self._session
        load.begin()
        load.begun = True
        try:
            log = RunLog.open(self._store, options=self._log_options, observer=self._observer)
            load.run, load.catalog = log.run, Catalog(log)
            load.chosen = self._choose(load.catalog)
            with telling_what_to_do(log, load.chosen):
                parts = load_parts(self._store, load.chosen)
            load.contents = contents_of(parts, only=self._only)
        except Exception as error:  # noqa: BLE001  (raised by set_up_storage_reader)
            load.failure = error
        return load.contents.metadata

    def _choose(self, catalog: Catalog) -> Committed:
        name, step, seq = self._session.asked
        if (name, step, seq) != (None, None, None):
            return catalog.find(name, step=step, seq=seq)
        newest = catalog.latest()
        if newest is None:
            raise NotFoundError(
                f"Nothing is committed in {self._store.url}.", hint="Run `ckptstore ls URL`.", url=self._store.url
            )
        return newest

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001  (DCP's signature; it looks for the name `kwargs`)
        """Raise what `read_metadata` met.

        Raises:
            NotFoundError: There is no such checkpoint. ConflictError: it was retired meanwhile.
            IncompatibleStateError: `only` selects nothing of it.
            IntegrityError: The log or the manifest is damaged, or the log was lost.
        """
        if kwargs.get("use_collectives") is False:
            raise InvalidInputError(
                "Loading without collectives is not supported.", hint="Leave use_collectives alone."
            )
        if self._session.failure is not None:
            raise self._session.failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add which checkpoint this rank chose, and what its target asks for."""
        assert self._session.chosen is not None  # noqa: S101  (set_up_storage_reader has raised otherwise)
        ours = isinstance(plan.planner_data, tuple)  # StrictLoadPlanner's
        keys = plan.planner_data if ours else (item.storage_index.fqn for item in plan.items)
        choice = Choice(self._session.chosen.seq, self._session.chosen.blake3, frozenset(keys), ours)
        return dataclasses.replace(plan, storage_data=choice)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse a mixture of checkpoints (I12), and keys that nobody asks for.

        Raises:
            DisagreementError: Ranks chose different checkpoints.
            IncompatibleStateError: The checkpoint has keys that no rank's target has.
        """
        choices: list[Choice] = [plan.storage_data for plan in plans]
        agreement.same(["the checkpoint they chose"], [[f"seq {c.seq}, {c.blake3[:16]}"] for c in choices])  # I12
        skipped = self._unasked(choices)
        self._tell_passed_over()
        load_id = self._ids.nonce()
        return [
            dataclasses.replace(plan, storage_data=LoadTicket(load_id, rank, len(plans), skipped))
            for rank, plan in enumerate(plans)
        ]

    def _tell_passed_over(self) -> None:
        if self._observer is silent or self._session.asked != (None, None, None):
            return
        assert self._session.catalog is not None  # noqa: S101  (read_metadata chose from it)
        assert self._session.chosen is not None  # noqa: S101  (the same)
        with contextlib.suppress(CkptStoreError):  # what is told can never fail a load
            for name, reason in self._session.catalog.passed_over(self._session.chosen):
                tell(self._observer, PassedOver(name, reason))

    def _unasked(self, choices: Sequence[Choice]) -> tuple[str, ...]:
        """Return the keys that no rank asks for, refusing them unless that is allowed."""
        held = self._session.contents.metadata.state_dict_metadata
        asked = frozenset[str]().union(*(choice.keys for choice in choices))
        if not all(choice.all_keys for choice in choices):
            asked |= {key for key, it in held.items() if isinstance(it, TensorStorageMetadata) and 0 in it.size}
        unasked = tuple(sorted(held.keys() - asked))
        if unasked and not self._allow_unexpected:
            raise IncompatibleStateError(
                f"{len(unasked)} keys of the checkpoint are in no rank's target: {', '.join(unasked[:8])}.",
                hint="Give the target these keys (an optimizer that never stepped has none: take its state from DCP's "
                "get_state_dict), load a part with only=(...), or pass allow_unexpected=True.",
                unexpected=unasked[:200],
                unexpected_count=len(unasked),
                asked=sorted(asked)[:200],
            )
        return unasked

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Check everything that can be checked on all ranks, then fill the targets with verified bytes.

        Raises:
            IncompatibleStateError: Dtypes or shapes differ. No target was touched, on any rank.
            IntegrityError: Bytes are not what was written. The message says which tensors were written by then, and the
                fact `untouched` whether every target of every rank is still what it was.
            ConflictError: The checkpoint was retired meanwhile, and bytes of it are gone; it says the same.
            CkptStoreError: Anything else failed while targets were filled; it says the same.
            UnsafePickleError: A value needs pickle and that is not allowed. No target was touched.
            DisagreementError: A rank did not come.
        """
        began = time.monotonic()
        ticket = plan.storage_data
        chosen, catalog = self._session.chosen, self._session.catalog
        if not isinstance(ticket, LoadTicket) or chosen is None or catalog is None:
            raise InvalidInputError("This plan was not made by this reader.", hint="Use one reader for one load.")
        self._session.ticket = ticket
        with telling_what_to_do(catalog.log, chosen):
            self._fill(ticket, plan, planner, began)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, ticket: LoadTicket, plan: LoadPlan, planner: LoadPlanner, began: float) -> None:
        reads, values = Reads((), ()), []
        fetcher = Fetcher(self._store, self._transfer)

        def check() -> None:
            nonlocal reads, values
            reads = reads_of(plan, planner, self._session.contents)
            check_dtypes(reads, allow_cast=self._allow_cast)
            fetcher.check_structure(reads.shards)
            values = fetcher.values(reads.values, allow_pickle=self._allow_pickle)

        self._agree(ticket, "check", check)
        if self._verify_first:
            self._agree(ticket, "scan", lambda: fetcher.scan(reads.tensors), longest=SCAN_SECONDS)
        filled: list[str] = []
        with telling_what_was_filled(filled, ranks=ticket.world_size):
            fetcher.fill(reads.tensors, filled)
            for read in reads.tensors:
                planner.commit_tensor(read.item, read.target)
            for value, stream in zip(reads.values, values, strict=True):
                filled.append(value.stored.chunk.tensor.name)
                planner.load_bytes(value.item, stream)
        self._end(reads, ticket, planner, fetcher.bytes_fetched, time.monotonic() - began)

    def _agree(
        self, ticket: LoadTicket, what: str, mine: Callable[[], None], *, longest: float = LONGEST_WORK_SECONDS
    ) -> None:
        """Do `mine` on every rank; if it fails on one, all raise that, and no target was touched on any."""
        peers = ranks.meet(ticket.rank, ticket.world_size, f"load/{ticket.load_id}/{what}")
        seconds = self._seconds + agreement.work_seconds(peers, longest=longest)
        try:
            agreement.agree(peers, mine, lambda _: None, seconds=seconds)
        except CkptStoreError as error:
            error.facts |= {"written": [], "written_count": 0, "untouched": True}
            error.message += " No target was touched."
            raise

    def _end(self, reads: Reads, ticket: LoadTicket, planner: LoadPlanner, fetched: int, seconds: float) -> None:
        assert self._session.chosen is not None  # noqa: S101  (checked by read_data)
        name, seq = self._session.chosen.commit.checkpoint_id, self._session.chosen.seq
        missing = tuple(getattr(planner, "missing", ()))
        if self._session.run is not None:
            incarnations.note_loaded(self._store.url, self._session.run, seq)
        self._session.report = LoadReport(name, seq, ticket.skipped, missing, reads.casts, fetched)
        self._newest_report = self._session.report
        tell(self._observer, Loaded(name, seq, fetched, seconds))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a name alone does not say where the run is, so DCP never chooses this reader by itself."""
        del checkpoint_id
        return False


def _checked_prefixes(only: object) -> tuple[str, ...]:
    prefixes = tuple(only) if isinstance(only, Iterable) and not isinstance(only, str) else ()
    if not prefixes or not all(isinstance(prefix, str) and prefix for prefix in prefixes):
        raise InvalidInputError(f"only={only!r:.80} is no list of keys.", hint="Pass only=('model',), say.")
    return prefixes
