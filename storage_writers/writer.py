"""`CkptStoreWriter`: DCP's storage writer over the commit protocol."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.events import Observer, silent
from ckptstore.format.documents import Documents, encode_documents
from ckptstore.objectstore.port import ObjectStore
from ckptstore.options import LogOptions, TransferOptions, check_flags, check_kinds, check_seconds
from ckptstore.protocol.attempt import Description, begin
from ckptstore.protocol.claim import Takeover, check_takeover, check_who
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import RunLog
from storage_writers import agreement, incarnations, ranks
from storage_writers.fences import Fence, Optimizer
from storage_writers.metadata import check_written, encode_planner
from storage_writers.planning import Contents, Ticket, check_caching, check_items, check_plans
from storage_writers.receipts import received
from storage_writers.roots import open_root
from storage_writers.saving import Save
from storage_writers.session import SaveSession
from storage_writers.settling import Limits, WhenBusy
from storage_writers.uploading import write_shard


class CkptStoreWriter(StorageWriter, AsyncStager):
    """Writes checkpoints that are whole or absent.

    One writer object, or a new one per save, in any mixture of sync and async saves: a process has one incarnation per
    run and never fences itself. Picklable; the copy saves as the same incarnation. `dcp.async_save` stages through it,
    and one background save is outstanding at a time. `close` it, or use it with `with`.

    Args:
        url: Root of the run; or an open store.
        engine: What moves the bytes, where a scheme has several: `obstore` or `s3fs` for `s3://`.
        storage_options: Of the store's engine.
        process_group: The ranks that save together; pass the same to `dcp.save`. None: all ranks.
        takeover: `same_job` refuses a run that another job has claimed (and asks for a name of this one); `always`
            fences it.
        job: What the scheduler calls this job; by default what it says in the environment.
        allow_pickle: Values that only unrestricted pickle can read are stored, and marked.
        allow_one_rank: This process saves alone, though others run.
        assume_single_writer: The user's promise that one process at a time appends. Fencing does not hold then. None:
            what `log` says.
        agree_timeout_seconds: How long a rank that does not come is waited for.
        staging_bytes: Host memory for the state of a background save; 0 streams everything. None: what it needs, at
            most half of what is free, divided by the ranks of this machine.
        when_busy: What becomes of a background save while another is in flight on some rank: it waits for it, is
            skipped, or raises BusyError on all. `dcp.async_save` cannot be skipped: there `skip` raises too.
        busy_timeout_seconds: How long a save waits for the one before.
        commit_timeout_seconds: A save that is not committed in this time is given up, and never is committed later.
        transfer: How bytes are moved.
        log: How records are appended.
        observer: Hears of every phase. It stays behind when the writer is pickled.

    Raises:
        InvalidInputError: An argument is outside of what is allowed.
    """

    def __init__(  # noqa: PLR0913  (a face takes written-out keywords)
        self,
        url: str | os.PathLike[str] | ObjectStore,
        *,
        engine: str | None = None,
        storage_options: Mapping[str, object] | None = None,
        process_group: dist.ProcessGroup | None = None,
        takeover: Takeover = "always",
        job: str | None = None,
        allow_pickle: bool = False,
        allow_one_rank: bool = False,
        assume_single_writer: bool | None = None,
        agree_timeout_seconds: float = 60.0,
        staging_bytes: int | None = None,
        when_busy: WhenBusy = "wait",
        busy_timeout_seconds: float = 1800.0,
        commit_timeout_seconds: float = 3600.0,
        transfer: TransferOptions | None = None,
        log: LogOptions | None = None,
        observer: Observer = silent,
    ) -> None:
        check_seconds(agree_timeout_seconds=agree_timeout_seconds)
        check_flags(allow_pickle=allow_pickle, allow_one_rank=allow_one_rank)
        check_kinds(transfer=(transfer, TransferOptions), log=(log, LogOptions))
        check_takeover(takeover)
        if job is not None:
            check_who(job=job)
        incarnations.check_named(job, takeover)
        self._url = url
        self._engine, self._storage_options = engine, storage_options
        self._takeover: Takeover = takeover
        self._job = job
        self._allow_pickle = allow_pickle
        self._session = SaveSession(
            process_group,
            one_rank=allow_one_rank,
            seconds=agree_timeout_seconds,
            limits=Limits(when_busy, busy_timeout_seconds, commit_timeout_seconds, staging_bytes),
            observer=observer,
        )
        self._transfer = transfer or TransferOptions()
        self._log_options = log or LogOptions()
        if assume_single_writer is not None:
            self._log_options = dataclasses.replace(self._log_options, assume_single_writer=assume_single_writer)
        self._observer = observer
        self._store = open_root(url, engine=engine, storage_options=storage_options, transfer=self._transfer)
        self.committed: Committed | None = None
        """The newest commit of this writer; on the coordinator only."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group for background saves: the one that was given, else a gloo group of all ranks. None for one rank.

        The first use makes it, which is collective: use it at the same point of the program on every rank.
        """
        return self._session.group if self._session.group is not None else ranks.background_group()

    def describe(  # noqa: PLR0913  (a face takes written-out keywords)
        self,
        *,
        global_step: int | None = None,
        parallelism: Mapping[str, int] | None = None,
        training_state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        fingerprints: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        documents: Mapping[str, Any] | Documents | None = None,
    ) -> None:
        """Say what the next save records; whether that ends well or not, it is used up. The coordinator's words count.

        What stands behind the fingerprints, `documents`, is JSON by name, kept beside the manifest parts.

        Raises:
            InvalidInputError: A value is not what it must be, or takes too much: 16 KiB for all, 16 MiB for documents.
        """
        behind = documents if isinstance(documents, Documents | None) else encode_documents(documents)
        tables = parallelism or {}, training_state or {}, metrics or {}, fingerprints or {}
        self._session.descriptions.say(Description(global_step, *tables, tags, behind))

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begin to copy the state into host memory, for the background save that `dcp.async_save` begins now.

        All ranks meet here and say how the save before ended. What has been described is bound to this save.

        Raises:
            StalledError: The save before has not ended in time, or was given up; the same on all ranks.
            BusyError: It has not ended, and the writer does not wait for it; the same on all ranks.
            UnsupportedError: DCP's `async_save` does not call it, or this torch is not known.
            CkptStoreError: It failed, and nobody was told; the same on all ranks.
        """
        return self._session.stage(state_dict)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `dcp.async_save` returns only when the state may be changed: unless an optimizer waits by itself.

        Raises:
            UnsupportedError: It began a save of which nobody would hear how it ends: this torch is not known.
        """
        return self._session.follow()

    def synchronize_staging(self) -> None:
        """Wait until the tensors of the state may be changed: all is copied, or was read by the upload.

        Raises:
            StalledError: The copy does not end.
        """
        self._session.fence()

    def fence_before(self, optimizer: Optimizer) -> Fence:
        """Let `optimizer.step()` wait for the staging, so that a background save returns as soon as copying began.

        The copy goes on during the next forward and backward pass, which must not change what is saved.

        Args:
            optimizer: The first one that changes the state; give each one that may be the first.

        Returns:
            What takes the fence away again, by `remove()`.
        """
        return Fence(self._session, optimizer)

    def wait(self) -> None:
        """Wait until the background save, if one is outstanding, has ended on all ranks. Collective, like a save.

        Raises:
            StalledError: It has not ended within `busy_timeout_seconds`, or was given up.
            DisagreementError: A rank did not come. The save is outstanding still.
            CkptStoreError: It failed, and nobody was told; the same on all ranks.
        """
        self._session.wait()

    def close(self) -> None:
        """Wait as `wait` does, and free the memory in which states were staged. Collective, like a save.

        Raises:
            CkptStoreError: See `wait`.
        """
        self._session.close()

    def let_go(self) -> None:
        """Free the memory in which states were staged, now or when the save in flight ends. Of this rank alone."""
        self._session.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self.close if kind is None else self.let_go  # then others may not come; the process's end tells the rest
        end()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save called `checkpoint_id`: all ranks agree on what it is, or all raise the same.

        A save in the foreground first waits for the one in the background.

        Raises:
            DisagreementError: Ranks are missing, or differ in name, step, root or run; each is named.
            InvalidInputError: The name cannot be used, or this process would save alone by mistake.
            UnsupportedError: The store cannot create only-if-absent; writing there could lose checkpoints.
            IntegrityError: The run's log is damaged, or was lost. Nothing was written.
            CkptStoreError: The background save before failed, and nobody was told; the same on all ranks.

        If killed: perhaps `run.json`, which says nothing but that the run exists.
        """
        self._session.begin(checkpoint_id, lambda peers: (self._store.url, self._read_run(peers)))

    def _read_run(self, peers: ranks.Peers) -> RunLog:
        """Return the run's log as this rank reads it; rank 0 begins the run if there is none."""
        if peers.world_size > 1 and self._store.engine == "memory":
            raise InvalidInputError(
                f"{self._store.url} is the memory of one process, and {peers.world_size} save.",
                hint="Save to a path, or to s3://.",
            )
        log = self._session.log
        if log is None or log.run is None:
            begin_log = RunLog.create if peers.rank == 0 else RunLog.open
            log = self._session.log = begin_log(self._store, options=self._log_options, observer=self._observer)
        return log

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001  (DCP's signature; it looks for the name `kwargs`)
        """Learn this rank's place. Without a `checkpoint_id`, the ranks agree here.

        Raises:
            UnsupportedError: `use_collectives=False`: every rank would commit by itself.
            InvalidInputError: DCP saves with other ranks than this writer.
        """
        if kwargs.get("use_collectives") is False:
            raise UnsupportedError(
                "use_collectives=False makes every rank commit a checkpoint of its own.", hint="Leave it out."
            )
        save = self._session.save
        # Described anew on this thread after `reset`: the save that `reset` began never came here.
        if save is None or save.set_up or self._session.descriptions.said_here:
            self.reset(None)
            save = self._begun()
        rank = kwargs.get("rank", 0)
        if rank != save.peers.rank or is_coordinator != (rank == 0):
            raise InvalidInputError(
                f"DCP calls this rank {rank}, the writer's group calls it {save.peers.rank}.",
                hint="Pass one process_group to dcp.save and to CkptStoreWriter, and not no_dist=True "
                "(or allow_one_rank=True, to save from one process alone).",
            )
        save.set_up = True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that every tensor of this rank can be stored.

        Raises:
            UnsupportedError: A dtype or layout cannot, or the plan is a reference to a cached one.
        """
        check_items(plan.items)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt (on the coordinator) and tell every rank where its shard goes.

        Raises:
            FencedError: A newer incarnation has claimed the run.
            IntegrityError: The run's log is damaged, or was lost. Nothing was written.
            InvalidInputError: There is nothing to save, or DCP saves with other ranks than this writer.

        If killed: perhaps a claim. Nothing of the attempt exists yet.
        """
        save = self._begun()
        log = save.log
        check_plans(plans, save.peers.world_size)
        for plan in plans:
            encode_planner(plan.planner_data)
        incarnation = incarnations.reign_at(self._store.url, log.run, job=self._job).incarnation
        attempt = begin(
            log,
            incarnation,
            checkpoint_id=save.name,
            world_size=len(plans),
            description=save.description,
            takeover=self._takeover,
        )
        save.begun = incarnation, attempt
        return [
            dataclasses.replace(plan, storage_data=Ticket(save.save_id, rank, attempt.stem))
            for rank, plan in enumerate(plans)
        ]

    def _begun(self) -> Save:
        if (save := self._session.save) is None:
            raise InvalidInputError("No save has begun.", hint="Call dcp.save with this writer.")
        return save

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream this rank's shard. No rank sends a byte before the values of all ranks have been checked.

        Raises:
            UnsafePickleError: A value needs pickle and that is not allowed; on all ranks, with its key.
            UnsupportedError: A value cannot be pickled, or the planner caches plans.
            InvalidInputError: The plan is of another save or another writer.
            DisagreementError: A rank did not come.
            CkptStoreError: The upload failed; it was aborted.

        If killed: nothing, or a whole shard, under a private prefix; perhaps an incomplete upload.
        """
        save = self._begun()
        contents: Contents | None = None

        def check() -> None:
            nonlocal contents
            save.gate.check()
            check_caching(planner, plan)
            ticket = plan.storage_data
            if not isinstance(ticket, Ticket) or ticket.save_id != save.save_id or ticket.rank != save.peers.rank:
                raise InvalidInputError(
                    "The plan is of another save.", hint="Use a planner that does not keep plans, and one per save."
                )
            contents = Contents(plan, planner, allow_pickle=self._allow_pickle, staged=save.staged)

        peers = dataclasses.replace(save.peers, channel=f"write/{save.save_id}")
        seconds = self._session.seconds + agreement.work_seconds(peers)  # they may resolve large values
        agreement.agree(peers, check, lambda _: None, seconds=seconds)
        assert contents is not None  # noqa: S101  (all ranks agree, so this one has checked)
        save.telling.ended("plan")
        done: Future[list[WriteResult]] = Future()
        write = partial(write_shard, self._store, plan, contents, options=self._transfer, observer=self._observer)
        done.set_result(write(check=save.gate.check) if plan.items else [])
        save.telling.ended("upload")
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinator: the one moment at which the checkpoint begins to exist.

        Raises:
            FencedError: A newer incarnation has claimed the run. Nothing was committed.
            SupersededError: A later attempt of this incarnation has committed. Nothing was committed.
            CommitUnknownError: Whether it was committed is not known. Delete nothing; the next save finds out.
            StalledError: Its time was over. Nothing was committed, and it never will be.
            IntegrityError: What was written is not what was planned. Nothing was committed.

        If killed: data under a private prefix, and the commit stands in the log or not.
        """
        save = self._begun()
        shards = received(results)
        check_written(metadata, shards)
        try:
            save.commit(shards, planner=encode_planner(metadata.planner_data), options=self._transfer)
        finally:
            self.committed = save.record or self.committed

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a name alone does not say where the run is, so DCP never chooses this writer by itself."""
        del checkpoint_id
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Carry the incarnation, and nothing live."""
        state = self.__dict__ | {"_observer": silent}
        run = log.run if (log := self._session.log) is not None else None
        state["_reign"] = incarnations.reign_at(self._store.url, run, job=self._job)
        if isinstance(self._url, str | os.PathLike):
            del state["_store"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        reign = state.pop("_reign")
        self.__dict__.update(state)
        if "_store" not in state:
            self._store = open_root(
                self._url, engine=self._engine, storage_options=self._storage_options, transfer=self._transfer
            )
        incarnations.adopt(self._store.url, reign)
