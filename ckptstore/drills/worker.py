"""What runs in the process of a rank: it joins its group, calls one function, and tells how that ended.

torch is imported only where it runs: who starts ranks does without.
"""

from __future__ import annotations

import datetime as dt
import importlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ckptstore.drills.place import Place
from ckptstore.errors import CkptStoreError
from ckptstore.protocol.capable import PROBED, place_of

GROUP_SECONDS = 120.0
"""On a slow machine ranks come late; who is gone is noticed by its connections."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a rank does.

    Args:
        place: The run.
        function: `module:function`.
        arguments: What it is called with besides.
        rank, world_size: Its place in the group.
        port: Of the group's store.
        environment: Of the process that started the drill.
        log: The file that takes what it prints.
    """

    place: Place
    function: str
    arguments: Mapping[str, Any]
    rank: int
    world_size: int
    port: int
    environment: Mapping[str, str]
    log: str


@dataclass(frozen=True, slots=True)
class Raised:
    """An error, as plain values: foreign ones cannot be sent.

    Args:
        kinds: The names of its class and of those that this is made of.
        message: Its text.
        trace: Where.
    """

    kinds: tuple[str, ...]
    message: str
    trace: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Return what is known of an error."""
        facts = error.facts if isinstance(error, CkptStoreError) else {}
        return cls(tuple(kind.__name__ for kind in type(error).__mro__), str(error), traceback.format_exc(), facts)


class Voice:
    """How a rank talks with whoever started it, whose end it does not outlive."""

    def __init__(self, pipe: Connection, task: Task) -> None:
        self.rank, self.world_size = task.rank, task.world_size
        self._pipe, self._lock = pipe, threading.Lock()
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, word: str, value: Any = None) -> None:
        """Say a word, and a plain value with it."""
        with self._lock:
            self._pipe.send((word, value))

    def hear(self, seconds: float) -> Any:
        """Return what it is told next."""
        return self._heard.get(timeout=seconds)

    def _listen(self) -> None:
        while True:
            try:
                self._heard.put(self._pipe.recv())
            except (EOFError, OSError):
                os._exit(1)


def found(name: str) -> Callable[..., Any]:
    """Return the function that is called `module:function`."""
    module, _, function = name.partition(":")
    named: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return named


def serve(pipe: Connection, task: Task) -> None:
    """Do a task, and say `ended` with what came out, or `raised`."""
    _be_quiet(task.log)
    import torch  # noqa: PLC0415  (see above)
    import torch.distributed as dist  # noqa: PLC0415  (the same)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415  (the same)

    os.environ.clear()
    os.environ.update({**task.environment, "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"})
    torch.set_num_threads(1)
    voice = Voice(pipe, task)
    try:
        if task.place.prepare is not None:
            found(task.place.prepare)(task.place)
        PROBED.add(place_of(task.place.store()))  # whoever started the drill has asked it
        limit = dt.timedelta(seconds=GROUP_SECONDS)
        store = TCPStore("127.0.0.1", task.port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=limit)
        outcome: tuple[str, Any] = "ended", found(task.function)(voice, task.place, **task.arguments)
    except SystemExit:  # its exit code says what became of it
        raise
    except BaseException as error:  # noqa: BLE001  (handed over)
        outcome = "raised", Raised.of(error)
    voice.say(*outcome)
    if dist.is_initialized():
        dist.destroy_process_group()


def keep_meeting(pipe: Connection, log: str) -> None:
    """Keep the store of a group, as a launcher does: it outlives every rank. Say its port."""
    _be_quiet(log)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415  (see above)

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(0)


def _be_quiet(log: str) -> None:
    """Let what is printed here, also by torch's own code, go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(log, "ab") as file:  # noqa: PTH123  (its number is what is asked for)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
