"""Trainings in processes of their own, which tell of each step and may be killed at any."""

from __future__ import annotations

import hashlib
import multiprocessing
import threading
import time

import torch
from ranks import PRELOADED
from trainings import Training

from ckptstore.events import ShardStored
from ckptstore.training import Checkpointer

EVERY = 5
LIMIT_SECONDS = 60.0


class Job:
    """A process that trains. It ends by itself, or is killed at the end of the `with`.

    Args:
        url: Where it saves; None: nowhere.
        seed: Of the process's own random numbers.
        optimizer: See `Training`.
        steps: How many it does, after those that were saved; then it waits to be killed if it `waits`.
        hangs_at: The first save that begins at this step or later hangs in the background, its shard stored.
    """

    def __init__(self, url, *, seed, optimizer, steps, waits=False, hangs_at=None):
        training = {"seed": seed, "optimizer": optimizer, "workers": 2}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_train, args=(theirs, url, training, steps, waits, hangs_at))
        self.process.start()
        theirs.close()

    def told(self):
        """Return what it tells next: a name and a value."""
        assert self._pipe.poll(LIMIT_SECONDS), "the training tells nothing"
        return self._pipe.recv()

    def until(self, wanted):
        """Return the value of the first that has this name, or is the end of this step or of a later one."""
        while True:
            name, value = self.told()
            if name == wanted or (name == "step" and isinstance(wanted, int) and value[0] >= wanted):
                return value

    def all(self):
        """Return what it resumed from, the digest of each step, and the verdict on its first steps."""
        _, begun = self.told()
        steps = {}
        while True:
            name, value = self.told()
            if name == "end":
                return begun, steps, value
            steps[value[0]] = value[1]

    def kill(self):
        self.process.kill()
        self.process.join(LIMIT_SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self._pipe.close()


class _Told:
    """Stands between the loop and its checkpointer, and tells of each step."""

    def __init__(self, training, checkpointer, tell):
        self.training, self.checkpointer, self.tell = training, checkpointer, tell

    def observe(self, **seen):
        self.tell("step", (self.training.progress.global_step, digest(self.training)))
        if self.checkpointer:
            self.checkpointer.observe(**seen)

    def due(self):
        return self.checkpointer is not None and self.checkpointer.due()

    def save(self, **said):
        self.checkpointer.save(**said)


def digest(training):
    """Return what tells weights, buffers, learning rate and scale apart, bit by bit."""
    found = hashlib.sha256(repr((training.state.learning_rates(), training.scaler.get_scale())).encode())
    for name, tensor in training.model.state_dict().items():
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def _train(pipe, url, options, steps, waits, hangs_at):
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of its loader's workers, as in a process started by hand
    lock = threading.Lock()

    def tell(name, value):
        with lock:
            pipe.send((name, value))

    training = Training(**options)
    progress = training.progress

    def observer(event):
        if hangs_at is None or not isinstance(event, ShardStored):
            return
        saved = int(event.path.split("/step-")[1].partition(".")[0])  # the training may be further on
        if saved >= hangs_at:
            tell("stored", saved)
            time.sleep(LIMIT_SECONDS)

    if url is None:
        tell("begun", None)
        training.train(steps, _Told(training, None, tell))
        tell("end", None)
        return
    with Checkpointer(url, training.state, every_steps=EVERY, observer=observer) as checkpointer:
        report = checkpointer.resume()
        tell("begun", report.global_step)
        training.train(progress.global_step + steps, _Told(training, checkpointer, tell))
        if waits:
            tell("waits", progress.global_step)
            time.sleep(LIMIT_SECONDS)
    tell("end", report.proof and report.proof.verdict)
