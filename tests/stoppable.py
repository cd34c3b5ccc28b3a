"""The least that can be trained, and runs of it in processes of their own, which signals may stop at any moment."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import itertools
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from ranks import PRELOADED
from torch import nn

from ckptstore import store
from ckptstore.events import Event, Stopping
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.throttled import ThrottledStore
from ckptstore.training import Checkpointer, Progress, TrainingState
from storage_writers import roots

LAST_STEP = 12


class Tiny:
    """Weights that add up what they were: after the same steps they are the same, whatever stood between."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.progress = Progress()
        self.state = TrainingState(model=self.model, optimizer=self.optimizer, progress=self.progress)

    def step(self) -> torch.Tensor:
        """Take a step; return its loss."""
        loss = self.model(torch.ones(1, 3) * (self.progress.global_step % 5)).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.progress.global_step += 1
        return loss.detach()

    def run(self, checkpointer: Checkpointer, until: int, *, seconds: float = 0.0) -> None:
        """Train until a step, each of which takes so long."""
        while self.progress.global_step < until:
            loss = self.step()
            time.sleep(seconds)
            checkpointer.observe(loss=loss)
            if checkpointer.due():
                checkpointer.save()


def slow_down(*, writes: float, reads: float) -> None:
    """Let every request of a writer, or of whoever resumes, made from now on in this process wait so many seconds."""

    def open_slowly(seconds: float, *args: Any, **options: Any) -> Any:
        return ThrottledStore(open_store(*args, **options), seconds_per_request=seconds)

    roots.open_store = partial(open_slowly, writes)
    store.open_store = partial(open_slowly, reads)


@dataclass
class Plan:
    """What a process does.

    Args:
        url: Root of the run.
        slow, slow_reads: Seconds that every request of a save takes, or of a resume.
        step_seconds: Seconds that a step takes.
        until: The last step.
        seed: Of the weights before anything is resumed; each job has its own.
        options: Of the checkpointer.
    """

    url: str
    slow: float = 0.0
    slow_reads: float = 0.0
    step_seconds: float = 0.01
    until: int = LAST_STEP
    seed: int = field(default_factory=itertools.count().__next__)
    options: dict[str, Any] = field(default_factory=dict)


def train(plan: Plan, say: Any) -> None:
    """Train as a job does, resuming what is there, and say where it is."""
    slow_down(writes=plan.slow, reads=plan.slow_reads)
    tiny = Tiny(plan.seed)

    def observe(event: Event) -> None:
        if isinstance(event, Stopping):
            say(("stopping", event))

    options = {"every_steps": 3, "observer": observe, **plan.options}
    with Checkpointer(plan.url, tiny.state, **options) as checkpointer:
        say("resume")
        report = checkpointer.resume()
        say(("resumed", report.global_step))
        while tiny.progress.global_step < plan.until:
            loss = tiny.step()
            say(("step", tiny.progress.global_step))
            time.sleep(plan.step_seconds)
            checkpointer.observe(loss=loss)
            if checkpointer.due():
                say(("save", tiny.progress.global_step))
                checkpointer.save()
        say("close")
    say(("ended", {name: each.tolist() for name, each in tiny.model.state_dict().items()}))


def _serve(pipe: Connection, plan: Plan, group: tuple[int, str, int, int] | None) -> None:
    sys.stderr = sys.stdout = io.StringIO()  # what it says at its end is no test's
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if group is not None:
        port, name, rank, world_size = group
        limit = dt.timedelta(seconds=30)
        meeting = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size, timeout=limit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a drill may have started this forkserver
    train(plan, pipe.send)


class Job:
    """The processes of one job.

    Args:
        plan: What they do.
        ranks: How many they are.
    """

    def __init__(self, plan: Plan, *, ranks: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.seed = plan.seed
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            group = None if self._store is None else (self._store.port, "job", rank, ranks)
            process = context.Process(target=_serve, args=(theirs, plan, group), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def await_word(self, word: Any, *, rank: int = 0, seconds: float = 30) -> Any:
        """Wait until a rank says a word, or something that begins with it, and return what follows."""
        until = time.monotonic() + seconds
        while True:
            assert self._pipes[rank].poll(max(0.0, until - time.monotonic())), f"rank {rank} never said {word!r}"
            said = self._pipes[rank].recv()
            if said == word or (isinstance(said, tuple) and said[0] == word):
                return said[1] if isinstance(said, tuple) else None

    def send(self, number: int, *, ranks: tuple[int, ...] | None = None) -> None:
        """Send a signal to some ranks; None: to all that run."""
        for rank, process in enumerate(self.processes):
            if (ranks is None or rank in ranks) and process.is_alive():
                os.kill(process.pid, number)

    def end(self, *, seconds: float = 30, ranks: tuple[int, ...] | None = None) -> list[int | None]:
        """Return the exit codes. Who has not ended in time is killed, and has none.

        Args:
            seconds: How long they are waited for.
            ranks: Who is waited for; None: all.
        """
        until = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            if ranks is None or rank in ranks:
                process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join(10)
        return codes

    def heard(self, rank: int = 0) -> dict[str, Any]:
        """Return what a rank that has ended said since it was listened to, by the first word."""
        said: dict[str, Any] = {}
        with contextlib.suppress(EOFError):
            while self._pipes[rank].poll():
                each = self._pipes[rank].recv()
                said.update([each] if isinstance(each, tuple) else [(each, None)])
        return said
