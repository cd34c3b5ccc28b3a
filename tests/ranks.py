"""Ranks as real processes, kept over the tests: starting four that have torch costs seconds, asking again does not.

They come from a forkserver that has imported torch once. Each job gets a process group of its own over a store in the
test's process, the environment that the test has at that moment, and a time limit; who exceeds it is killed.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

PRELOADED = [
    "torch",
    "torch._dynamo",  # else each process imports it, for seconds, at its first DTensor
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "storage_writers",
    "ckptstore.training",
    "ckptstore.objectstore.via_gcsfs",
    "ckptstore.objectstore.via_obstore",
    "ckptstore.objectstore.via_s3fs",
    "localstack.server",
    "pytest",
]


@dataclass
class Outcome:
    """What became of a job on one rank."""

    value: Any = None
    error: BaseException | None = None
    died: bool = False
    exitcode: int | None = None


class Gang:
    """Processes that run functions as the ranks of a group, which has a time-out of `group_seconds`."""

    def __init__(self, *, group_seconds: float = 60) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch asks for the name of each peer, for 5 s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._jobs, self._group_seconds = itertools.count(), group_seconds

    def start(self, world_size: int) -> list[BaseProcess]:
        """Start the processes of ranks 0 to `world_size` - 1 that do not run yet, and return all of them."""
        for rank in range(world_size):
            self._ensure(rank)
        return [process for process, _ in self._workers[:world_size]]

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Outcome]:
        """Run `function(*args)` on ranks 0 to `world_size` - 1 and return what became of it, by rank."""
        self.start(world_size)
        job = (
            self._store.port,
            next(self._jobs),
            world_size,
            self._group_seconds,
            function.__code__.co_filename,
            function.__qualname__,
            args,
            dict(os.environ),
        )
        for rank in range(world_size):
            self._workers[rank][1].send((rank, *job))
        deadline = time.monotonic() + seconds
        outcomes = [self._await(rank, deadline) for rank in range(world_size)]
        late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        if late:
            self.close()
            raise AssertionError(f"ranks {late} of {function.__qualname__} did not end within {seconds} s")
        return [outcome for outcome in outcomes if outcome is not None]

    def values(self, world_size: int, function: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
        """Run a job that must end well on every rank, and return what it returned."""
        outcomes = self.run(world_size, function, *args, seconds=seconds)
        failed = [
            f"rank {rank} {f'died ({outcome.exitcode})' if outcome.died else f'raised {outcome.error!r}'}"
            for rank, outcome in enumerate(outcomes)
            if outcome.died or outcome.error is not None
        ]
        if failed:
            error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
            raise AssertionError(f"{function.__qualname__}: {'; '.join(failed)}") from error
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Kill the processes."""
        for process, pipe in self._workers:
            process.kill()
            process.join(10)
            pipe.close()
        self._workers = []

    def _ensure(self, rank: int) -> None:
        if rank < len(self._workers) and self._workers[rank][0].is_alive():
            return
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        if rank < len(self._workers):
            self._workers[rank][1].close()
            self._workers[rank] = (process, ours)
        else:
            self._workers.append((process, ours))

    def _await(self, rank: int, deadline: float) -> Outcome | None:
        process, pipe = self._workers[rank]
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                return None
            value, error = pipe.recv()
            if error is not None:
                process.join(10)
        except (EOFError, OSError):
            process.join(10)
            return Outcome(died=True, exitcode=process.exitcode)
        return Outcome(value, error)


def _serve(pipe: Connection) -> None:
    modules: dict[str, ModuleType] = {}
    client = None  # kept over the jobs
    while True:
        try:
            rank, port, job, world_size, seconds, path, name, args, environment = pipe.recv()
        except (EOFError, OSError):
            return
        value, error = None, None
        os.environ.clear()
        os.environ.update(environment)
        try:
            client = client or dist.TCPStore("127.0.0.1", port, is_master=False)
            store, limit = dist.PrefixStore(f"job{job}", client), dt.timedelta(seconds=seconds)
            store.set_timeout(limit)  # as a launcher's is
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
            value = getattr(_module(modules, path), name)(*args)
        except BaseException as raised:  # noqa: BLE001  (CheckpointException is one; handed over)
            error = raised
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        try:
            pipe.send((value, error))
        except (TypeError, AttributeError, ValueError) as unpicklable:
            pipe.send((None, RuntimeError(f"rank {rank} cannot send {value!r}, {error!r}: {unpicklable}")))
        if error is not None:
            return  # as a trainer ends: the others learn of it by its connections


def _module(modules: dict[str, ModuleType], path: str) -> ModuleType:
    if path not in modules:
        name = f"ranks_of_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        modules[path] = importlib.util.module_from_spec(spec)
        sys.modules[name] = modules[path]
        spec.loader.exec_module(modules[path])
    return modules[path]
