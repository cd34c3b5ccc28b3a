"""Programs that save in the background, each run as a process with an end of its own, and the store that they use.

What the store does is said from outside, by a word in a file, so that the process in which DCP saves hears of it too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import AccessDeniedError
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore, ForwardingUpload

WAYS = ("sw.async_save", "dcp.async_save", "dcp.async_save by process")
PATHS = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), str(Path(__file__).parent)]


class Told(ForwardingStore):
    """Does what the file `orders` says: `full`, `denied`, `hangs`, `slow`; with a rank behind, only there."""

    def __init__(self, url, orders):
        super().__init__(open_store(url))
        self._said = url, str(orders)

    def __reduce__(self):
        return type(self), self._said

    def order(self):
        said, _, rank = Path(self._said[1]).read_text().partition(" ")
        here = dist.get_rank() if dist.is_initialized() else 0
        return said if not rank or int(rank) == here else ""

    def open_upload(self, key, *, size):
        while self.order() == "hangs":
            time.sleep(0.02)
        if self.order() == "slow":
            time.sleep(1)
        return _Told(super().open_upload(key, size=size), self)


class _Told(ForwardingUpload):
    def __init__(self, inner, store):
        super().__init__(inner)
        self._store = store

    def write(self, data):
        if self._store.order() == "full":
            raise OSError(28, "No space left on device")
        if self._store.order() == "denied":
            raise AccessDeniedError("403 AccessDenied: the token expired.")
        super().write(data)


def save(way, state, name, writer):
    """Begin a background save in one of three ways."""
    given = {"checkpoint_id": name, "storage_writer": writer}
    if way == "sw.async_save":
        return sw.async_save(state, **given)
    kind = AsyncCheckpointerType.PROCESS if way.endswith("by process") else AsyncCheckpointerType.THREAD
    return dcp.async_save(state, **given, process_group=writer.process_group, async_checkpointer_type=kind)


class Program:
    """What every program has: a way to save, a writer, and orders for its store."""

    def __init__(self, root, way, **options):
        self.root, self.way = root, way
        self.orders = Path(root).parent / "orders"
        self.order("")
        self.writer = sw.CkptStoreWriter(Told(root, self.orders), agree_timeout_seconds=20, **options)

    def order(self, word):
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.orders.with_suffix(".new").write_text(word)
            self.orders.with_suffix(".new").replace(self.orders)
        if dist.is_initialized():
            dist.barrier()

    def save(self, name, state=None):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return save(self.way, state or {f"w{rank}": torch.full((5000,), float(rank))}, name, self.writer)

    def kept(self):
        return [each.checkpoint_id for each in CheckpointStore.open(self.root).checkpoints()]

    def said(self, work):
        """Return what `work` raised, as kind, text and rank."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (CheckpointException is one)
            ours = sw.cause(error)
            return [type(ours or error).__name__, str(ours or error)]
        return None


# One process: how it ends


def fail(root, way, word):
    """Save well, then not, and end: nobody asks."""
    program = Program(root, way)
    program.save("good")
    program.writer.wait()
    program.order(word)
    program.save("bad")


def fail_and_ask(root, way, word):
    program = Program(root, way)
    program.order(word)
    assert program.save("bad").exception(60) is not None


def fail_and_exit_with_3(root, way, word):
    fail(root, way, word)
    sys.exit(3)


def fail_beside_other_things(root, way, word):
    """What else a process does at its end is done, once."""
    atexit.register(lambda: sys.stdout.write("handler "))
    program = Program(root, way)
    program.order(word)
    threading.Thread(target=lambda: (time.sleep(0.5), sys.stdout.write("thread "))).start()
    program.save("bad")
    atexit.register(lambda: sys.stdout.write("later handler "))
    sys.stdout.write("main ")


def end_while_saving(root, way, word):
    """The save is under way when the interpreter ends."""
    program = Program(root, way)
    program.order(word)
    program.save("late")


def end_while_hanging(root, way, word):
    program = Program(root, way, commit_timeout_seconds=2)
    program.order(word)
    program.save("never")


def crash_while_failing(root, way, word):
    program = Program(root, way)
    program.order(word)
    program.save("bad")
    raise ZeroDivisionError("in the training")


# Two ranks


def hear_of_failures(root, way, word):
    """One rank's store refuses, again and again; return what every rank heard from whatever came next."""
    program, heard = Program(root, way), {}
    program.save("good").result()
    ends = {
        "save": lambda: sw.save({"w": torch.ones(3)}, checkpoint_id="next", storage_writer=program.writer),
        "async save": lambda: program.save("next"),
        "wait": program.writer.wait,
        "close": program.writer.close,
    }
    for name, end in ends.items():
        program.order(word)
        program.save(f"bad {name}")
        heard[name] = program.said(end)
        heard[f"latest after {name}"] = program.kept()
    program.order("")
    program.save("after").result()
    program.writer.close()
    heard["in the end"] = program.kept()
    return heard


def lose_the_worker(root, way, word):
    """The process that saves on rank 1 is killed in its upload."""
    program, heard = Program(root, way, commit_timeout_seconds=60), {}
    program.save("good").result()
    program.order("hangs 1")
    began = time.monotonic()
    future = program.save("bad")
    time.sleep(3)
    assert not future.done()
    if dist.get_rank() == int(word):
        os.kill(executor._CHECKPOINT_PROCESS._save_process.pid, signal.SIGKILL)
    heard["error"] = program.said(program.writer.wait)
    heard["seconds"] = time.monotonic() - began
    program.order("")
    program.save("after").result()
    program.writer.close()
    heard["kept"] = program.kept()
    return heard


def send_what_cannot_be_imported(root, way, word):
    """The state holds a value of a class that the other process does not have."""
    del word
    module = types.ModuleType("only_here")
    exec("class Setting: pass", module.__dict__)  # noqa: S102  (our own)
    sys.modules["only_here"] = module
    program = Program(root, way)
    began = time.monotonic()
    heard = {"error": program.said(lambda: (program.save("bad", {"v": module.Setting()}), program.writer.wait()))}
    heard["seconds"] = time.monotonic() - began
    program.save("after").result()
    program.writer.close()
    heard["kept"] = program.kept()
    return heard


def save_typed_values(root, way, word):
    """Each rank has one of its own, and all have one."""
    del word
    program, rank = Program(root, way), dist.get_rank()
    mine = {
        f"ranks/{rank}/v": sw.TypedValue(b"[%d]" % rank),
        "values/v": sw.TypedValue(b"{}"),
        f"w{rank}": torch.ones(3),
    }
    program.save("a", mine).result()
    program.writer.close()
    checkpoint = CheckpointStore.open(root).get("a")
    return [checkpoint.value(key) for key in ("ranks/0/v", "ranks/1/v", "values/v")]


def save_many_tensors(root, way, word):
    """With few descriptors: many saves, the first of 5,000 tensors."""
    import resource  # noqa: PLC0415  (not everywhere)

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    program, open_files = Program(root, way), []
    rank = dist.get_rank()
    for step in range(int(word)):
        count = 5000 if step == 0 else 5
        state = {f"t{rank}.{index}": torch.full((3,), float(step)) for index in range(count)}
        program.save(f"step-{step}", state).result()
        worker = executor._CHECKPOINT_PROCESS._save_process.pid
        open_files.append([len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in ("self", worker)])
    program.writer.close()
    return {"open files": open_files, "kept": program.kept()}


# How they are run


def run(name, root, way, word):
    """The main program."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    heard = globals()[name](root, way, word)
    if heard is not None:
        sys.stdout.write(json.dumps(heard))
        sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


def start(name, root, way, word, *, ranks=0, port=0):
    """Run a program to its end; return the code, output and errors of each of its processes."""
    # What is run has no path, so that a process which DCP spawns does not run it too.
    code = f"import sys; sys.path[:0] = {PATHS!r}; import async_programs as a; a.run{(name, str(root), way, word)!r}"
    common = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "timeout:1 attempts:1",
        "PYTHONPATH": os.pathsep.join(PATHS),
    }
    environments = [
        common
        | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        | {"LOCAL_RANK": str(rank)}
        for rank in range(ranks)
    ] or [common]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=200)
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait(10)
    return ended
