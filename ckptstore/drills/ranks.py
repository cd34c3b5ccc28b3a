"""Ranks as real processes that talk, and that can be killed.

They come from a forkserver that has imported torch once: starting four that import it costs seconds each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckptstore.drills import worker
from ckptstore.drills.place import DRILL_SECONDS, CannotStart, NotAsPromised, Place

PRELOADED = [
    "torch",
    "torch._dynamo",  # else each process imports it, for seconds, at its first DTensor
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "storage_writers",
    "ckptstore.training",
    "ckptstore.drills.job",
    "ckptstore.drills.reshaped",
    "ckptstore.drills.saves",
    "ckptstore.drills.trouble",
    "ckptstore.drills.worker",
]
ENGINES = {"obstore": "via_obstore", "s3fs": "via_s3fs", "gcsfs": "via_gcsfs", "fsspec": "via_fsspec"}
TAIL_BYTES = 2000
IMPORT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a rank.

    Args:
        value: What its function returned.
        error: What it raised.
        died: It ended without a word; the number of the signal that killed it, or its exit code.
    """

    value: Any = None
    error: worker.Raised | None = None
    died: int | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"it raised {self.error.kinds[0]}: {self.error.message}"
        return "it ended well" if self.died is None else f"it died ({self.died})"


class Ranks:
    """The processes of one job. They are dead at the end of the `with`. See `Place.ranks`."""

    def __init__(self, place: Place, world_size: int, function: str, arguments: Mapping[str, Any]) -> None:
        self._place, self._name = place, function.partition(":")[2]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, f"ckptstore.objectstore.{_module_of(place)}"])
        self._folder = tempfile.TemporaryDirectory(prefix="ckptstore-drill-")
        self.said: list[list[tuple[str, Any]]] = [[] for _ in range(world_size)]
        """What each rank said so far."""
        self._read = [0] * world_size
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._started: list[tuple[BaseProcess, Connection]] = []
        """The workers, and who keeps what they meet in."""
        self._starting, self._closed = threading.Lock(), False
        place.started.append(self)
        try:
            place.check_open()  # now that `close` finds this here
            port = self._open_meeting()
            for rank in range(world_size):
                task = worker.Task(
                    place, function, dict(arguments), rank, world_size, port, dict(os.environ), self._log(rank)
                )
                self._workers.append(self._start(worker.serve, task))
        except BaseException:
            self.close()
            raise

    def hear(self, word: str, *, rank: int = 0, seconds: float = DRILL_SECONDS) -> Any:
        """Wait until a rank says a word, and return the value that comes with it. Each is heard once, in order.

        Raises:
            NotAsPromised: It has ended without it, or does not say it in time.
        """
        until = time.monotonic() + self._place.left_seconds(seconds)
        while True:
            while self._read[rank] < len(self.said[rank]):
                said, value = self.said[rank][self._read[rank]]
                self._read[rank] += 1
                if said == word:
                    return value
            if self._is_over(rank) or not self._listen(rank, until - time.monotonic()):
                raise NotAsPromised(f"Rank {rank} of `{self._name}` never said {word!r}. {self._why(rank)}")

    def tell(self, rank: int, value: Any) -> None:
        """Tell a rank something."""
        with contextlib.suppress(OSError):
            self._workers[rank][1].send(value)

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        pid = self._workers[rank][0].pid
        if pid is not None and self._workers[rank][0].is_alive():
            os.kill(pid, number)

    def kill(self, rank: int) -> None:
        """Kill a rank, as the kernel does that runs out of memory, and wait until it is dead."""
        self.send(rank, signal.SIGKILL)
        self._workers[rank][0].join(self._place.left_seconds(10))

    def outcomes(self, *, seconds: float = DRILL_SECONDS) -> list[Outcome]:
        """Wait until all ranks have ended, and return what became of each.

        Raises:
            NotAsPromised: One does not end in time.
        """
        until = time.monotonic() + self._place.left_seconds(seconds)
        for rank in range(len(self._workers)):
            while not self._is_over(rank):
                if not self._listen(rank, until - time.monotonic()):
                    raise NotAsPromised(f"Rank {rank} of `{self._name}` did not end in time. {self._why(rank)}")
        return [self._outcome(rank) for rank in range(len(self._workers))]

    def results(self, *, seconds: float = DRILL_SECONDS) -> list[Any]:
        """Wait until all ranks have ended well, and return what their function returned.

        Raises:
            NotAsPromised: One has not, or does not end in time.
        """
        outcomes = self.outcomes(seconds=seconds)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None or outcome.died is not None:
                raise NotAsPromised(f"Rank {rank} of `{self._name}` failed. {self._why(rank)}")
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Kill the processes. The drill's own thread and the one that gives it up may call it at once."""
        with self._starting:
            self._closed = True
            while self._started:
                process, pipe = self._started[-1]
                process.kill()
                process.join(10)
                pipe.close()
                self._started.pop()
            self._folder.cleanup()
            if self in self._place.started:
                self._place.started.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, target: Any, *arguments: Any) -> tuple[BaseProcess, Connection]:
        with self._starting:
            if self._closed:
                raise NotAsPromised("The drill was over before all its ranks had started.")
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=target, args=(theirs, *arguments), daemon=True)
            process.start()
            self._started.append((process, ours))
        theirs.close()
        return process, ours

    def _open_meeting(self) -> int:
        try:
            _start_forkserver()
            _, pipe = self._start(worker.keep_meeting, self._log(-1))
            if pipe.poll(self._place.left_seconds(DRILL_SECONDS)):
                return int(pipe.recv())
        except (EOFError, OSError):
            pass
        _check_torch()
        raise NotAsPromised("The ranks have nowhere to meet: no process could be started in time.")

    def _listen(self, rank: int, seconds: float) -> bool:
        """Take in the next word of a rank, or its death; say whether there was any."""
        process, pipe = self._workers[rank]
        if not wait([pipe, process.sentinel], max(0.0, seconds)):
            return False
        try:
            if pipe.poll():
                self.said[rank].append(pipe.recv())
                return True
        except (EOFError, OSError):
            process.join(10)
        self.said[rank].append(("died", process.exitcode))
        return True

    def _is_over(self, rank: int) -> bool:
        return any(word in ("ended", "raised", "died") for word, _ in self.said[rank][-1:])

    def _outcome(self, rank: int) -> Outcome:
        word, value = self.said[rank][-1]
        return Outcome(
            value=value if word == "ended" else None,
            error=value if word == "raised" else None,
            died=value if word == "died" else None,
        )

    def _why(self, rank: int) -> str:
        """Return what is known of a rank that did not do what it should."""
        word, value = self.said[rank][-1] if self.said[rank] else ("", worker.Raised((), "", ""))
        if word == "raised":
            return f"It raised {value.kinds[0]}: {value.message}"
        heard = ", ".join(dict.fromkeys(said for said, _ in self.said[rank])) or "nothing"
        tail = Path(self._log(rank)).read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace") if word == "died" else ""
        return f"It said: {heard}.{f' It printed: {tail}' if tail else ''}"

    def _log(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"rank{rank}")


def _start_forkserver() -> None:
    """Start it deaf to Ctrl-C, which a terminal sends to all: it would tell where in its imports it was."""
    resource_tracker.ensure_running()  # else the forkserver does it, and that unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_torch() -> None:
    """Check that torch can be imported at all.

    Raises:
        CannotStart: It cannot.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(
            [sys.executable, "-c", "import torch"], check=False, capture_output=True, timeout=IMPORT_SECONDS
        )
        if ended.returncode:
            why = ended.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2] or f"exit {ended.returncode}"
            raise CannotStart(f"Ranks cannot start: torch cannot be imported. {why}")


def _module_of(place: Place) -> str:
    return ENGINES.get(place.store().engine, "local")
