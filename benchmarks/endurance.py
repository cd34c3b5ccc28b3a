"""Half an hour of a job of four ranks on SeaweedFS that is killed, stopped, throttled, cut off, and collected.

Ranks get SIGKILL and SIGSTOP at seeded moments; a whole job is stopped, another takes over, and the first wakes up; the
server is restarted twice; the network is slow and refuses requests from time to time; `ckptstore gc` runs all the time.
Nothing that was committed may be lost or unreadable, nothing else may be selected, and memory, descriptors, threads and
objects are bounded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.endurance_rank import Start, run
from benchmarks.endurance_watch import judged, lines, watch
from ckptstore import CheckpointStore, UnavailableError
from ckptstore.objectstore.urls import open_store
from localstack.faults import s3_error
from localstack.proxy import Proxy
from localstack.seaweedfs import SeaweedFS

KEEP, GRACE_SECONDS = 6, 20
END_SECONDS = 150.0
"""So long the other ranks may take to end when one is gone: the group's time-out, and a save that was under way."""
READY_SECONDS = 120.0
COLLECT_SECONDS = 15.0
WEATHER_SECONDS = 25.0
BYTES_PER_SECOND = 3_000_000
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "ckptstore.training"]
PRELOADED += ["ckptstore.objectstore.via_obstore", "benchmarks.endurance_rank", "benchmarks.endurance_watch"]
ALLOWED = {"resident_mib": 48.0, "descriptors": 16, "threads": 8}
"""How much the least that a process holds may grow from its fifth save, or its first minute of looking, to its end: a
client keeps connections that it had once, see MOST."""
MOST = {"resident_mib": 1024.0, "descriptors": 128, "threads": 64}
"""How much it may hold at any moment: connections and threads come and go with what is on its way."""
OBJECTS_OF_ONE = 12
"""Of a checkpoint under `data/`, at most: four shards, a part, documents, a trace, a copy of the commit; and room."""


def main(argv: list[str]) -> int:
    """Run it; return 1 if anything was lost, wrong, or grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks endurance", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long. [30]")
    parser.add_argument("--ranks", type=int, default=4, help="of the job. [4]")
    parser.add_argument("--seed", type=int, default=1, help="of what is done when. [1]")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="instead of benchmarks/results")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ckptstore-endurance-") as name, SeaweedFS() as server:
        found = Ordeal(server, Path(name), given.ranks, given.seed).endure(60 * given.minutes)
    about = {"minutes": given.minutes, "ranks": given.ranks, "seed": given.seed, "allowed": ALLOWED}
    print(json.dumps({name: found[name] for name in found if name != "starts"}, indent=1))
    print(results.write("endurance", [found], about=about, folder=given.results))
    return 1 if found["wrong"] else 0


class Job:
    """The ranks of one start."""

    def __init__(self, start: Start) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(PRELOADED)
        self.start = start
        self.ranks: list[BaseProcess] = [
            forks.Process(target=run, args=(start, rank), daemon=True) for rank in range(start.ranks)
        ]
        for rank in self.ranks:
            rank.start()

    @property
    def alive(self) -> list[BaseProcess]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.is_alive()]

    @property
    def has_committed(self) -> bool:
        """Whether this start has a commit of its own."""
        return any("committed" in line for line in lines(self.start.told(0)))

    @property
    def has_resumed(self) -> bool:
        """Whether this start has claimed the run, and chosen where it goes on."""
        return any("resumed" in line for line in lines(self.start.told(0)))

    def send(self, number: int) -> None:
        """Send a signal to all ranks that are there."""
        for rank in self.alive:
            os.kill(rank.pid or 0, number)

    def end(self, seconds: float) -> int:
        """Wait until all ranks have ended; kill those that do not in time, and return how many that were."""
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        late = self.alive
        for rank in late:
            rank.kill()
            rank.join()
        return len(late)


class Ordeal:
    """What is done to a job, and what is seen.

    Args:
        server: Runs.
        folder: Empty.
        ranks: Of the job.
        seed: Of what is done when.
    """

    def __init__(self, server: SeaweedFS, folder: Path, ranks: int, seed: int) -> None:
        self.server, self.folder, self.ranks = server, folder, ranks
        self.url = server.url("run")
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.starts: list[Start] = []
        self.objects: list[int] = []
        self._random = random.Random(seed)  # noqa: S311  (no secret)
        self._over = threading.Event()

    def endure(self, seconds: float) -> dict[str, Any]:
        """Do it for so long, and return what was found."""
        began = time.monotonic()
        watching = multiprocessing.get_context("forkserver").Process(
            target=watch, args=(self.url, self.server.options(), self.folder / "watch"), daemon=True
        )
        with Proxy(self.server.endpoint) as self.proxy, self._beside(self._weather), self._beside(self._collect):
            watching.start()
            self._disturb(began, seconds)
        watching.kill()
        watching.join()
        self._collect_once(grace=0)
        return self._found(time.monotonic() - began)

    def _disturb(self, began: float, seconds: float) -> None:
        job = self._begin()
        restarts = [began + seconds / 3, began + 2 * seconds / 3]
        while (now := time.monotonic()) < began + seconds:
            if restarts and now >= restarts[0]:
                restarts.pop(0)
                self.server.restart()
                self.done["server restarted"] += 1
            if len(job.alive) < self.ranks:
                self._end(job)
                job = self._begin()
            self._over.wait(self._random.uniform(4, 40))
            act = self._random.choices((self._kill, self._stop, self._nothing, self._take_over), (5, 4, 4, 2))[0]
            job = act(job)
        job.send(signal.SIGCONT)
        job.send(signal.SIGTERM)
        self._end(job)

    def _begin(self) -> Job:
        options = self.server.options(self.proxy.endpoint)
        start = Start(len(self.starts), self.folder, self.url, options, self.ranks, KEEP, GRACE_SECONDS)
        self.starts.append(start)
        self.done["job started"] += 1
        return Job(start)

    def _end(self, job: Job) -> None:
        if late := job.end(END_SECONDS):
            said = job.start.said(0).read_text(errors="replace")[-300:]
            self.wrong.append(f"{late} ranks of start {job.start.number} did not end in {END_SECONDS} s: {said}")

    def _kill(self, job: Job) -> Job:
        if alive := job.alive:
            self._random.choice(alive).kill()
            self.done["rank killed"] += 1
        return job

    def _stop(self, job: Job) -> Job:
        if alive := job.alive:
            rank = self._random.choice(alive)
            os.kill(rank.pid or 0, signal.SIGSTOP)
            self._over.wait(self._random.uniform(2, 20))
            if rank.is_alive():
                os.kill(rank.pid or 0, signal.SIGCONT)
            self.done["rank stopped and continued"] += 1
        return job

    def _nothing(self, job: Job) -> Job:
        return job

    def _take_over(self, job: Job) -> Job:
        """Stop a whole job, let another commit, and wake the first: it must end.

        One that has not claimed the run yet would do so when it wakes, and be the newer one: it is left alone.
        """
        if not job.has_resumed:
            return job
        job.send(signal.SIGSTOP)
        other = self._begin()
        deadline = time.monotonic() + READY_SECONDS
        while not other.has_committed and len(other.alive) == self.ranks and time.monotonic() < deadline:
            self._over.wait(0.5)
        took_over = other.has_committed
        job.send(signal.SIGCONT)
        if took_over:
            self._end(job)
            self.done["job taken over while it was stopped"] += 1
            return other
        other.send(signal.SIGKILL)  # the first may go on or be fenced: either is right
        other.end(END_SECONDS)
        return job

    @contextlib.contextmanager
    def _beside(self, act: Callable[[], None]) -> Iterator[None]:
        thread = threading.Thread(target=act)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _weather(self) -> None:
        """Slow lines, refusals, and fair weather, in turn."""
        while not self._over.wait(WEATHER_SECONDS):
            self.proxy.bytes_per_second = BYTES_PER_SECOND
            self.done["throttled"] += 1
            self._over.wait(WEATHER_SECONDS)
            self.proxy.bytes_per_second = None
            with self.proxy.rule(s3_error(503, "SlowDown"), share=0.3):
                self.done["refusals"] += 1
                self._over.wait(WEATHER_SECONDS / 2)
            self.proxy.seen.clear()

    def _collect(self) -> None:
        while not self._over.wait(COLLECT_SECONDS):
            self._collect_once(grace=GRACE_SECONDS)

    def _collect_once(self, *, grace: int) -> None:
        with contextlib.suppress(Exception):  # the server may be away
            self.objects.append(
                sum(1 for _ in open_store(self.url, storage_options=self.server.options()).list("data/"))
            )
        told = ["--keep-last", str(KEEP), "--grace", str(grace), "--json"]
        code, plan = self._cli("gc", self.url, "--dry-run", *told)
        if code == 0:
            code, _ = self._cli("gc", self.url, "--apply", plan["digest"], *told)
        self.done[f"collection ended with {code}"] += 1
        with contextlib.suppress(UnavailableError):  # it is being restarted
            store = open_store(self.url, storage_options=self.server.options())
            self.objects.append(sum(1 for _ in store.list("data/")))

    def _cli(self, *words: str) -> tuple[int, Any]:
        command = [sys.executable, "-m", "ckptstore.cli", *words]
        environment = {**os.environ, **self.server.environment}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=END_SECONDS
            )
        except subprocess.TimeoutExpired:
            self.wrong.append(f"{' '.join(words[:3])} did not end in {END_SECONDS} s")
            return -1, {}
        return done.returncode, json.loads(done.stdout) if done.stdout else {}

    def _unshown(self, facts: Mapping[str, Any], worst: Mapping[str, float | None]) -> list[str]:
        """Return what did not happen though it should, or was not bounded."""
        least = {"rank killed", "rank stopped and continued", "server restarted", "throttled", "refusals"}
        unshown = [f"nothing was done of: {what}" for what in sorted(least - self.done.keys())]
        if not self.done["collection ended with 0"] or not facts["records"].get("COLLECTED"):
            unshown.append("nothing was collected")
        unshown += [f"{name} was not measured for long enough" for name, most in worst.items() if most is None]
        left, most_left = self.objects[-1:], OBJECTS_OF_ONE * (len(facts["kept"]) + len(facts["uncommitted"]))
        if not left or left[0] > most_left:
            unshown.append(f"{left} objects are left, at most {most_left} may be")
        return unshown

    def _found(self, seconds: float) -> dict[str, Any]:
        ranks = [lines(start.told(rank)) for start in self.starts for rank in range(self.ranks)]
        committed = [line["committed"] for told in ranks for line in told if "committed" in line]
        resumed = [line for told in ranks for line in told if "resumed" in line]
        looked = lines(self.folder / "watch")
        wrong = list(self.wrong)
        wrong += [f"resumed from {each['resumed']} with other values" for each in resumed if not each["right"]]
        wrong += [each for line in looked for each in line["wrong"]]
        store = CheckpointStore.open(self.url, storage_options=self.server.options())
        facts, amiss = judged(store, committed)
        left = list(open_store(self.url, engine="s3fs", storage_options=self.server.options()).list_uploads(""))
        wrong += [*amiss, *(f"{each.key} is an upload that nobody ended" for each in left)]
        grown = [growth([line["held"] for line in told if "held" in line][5:]) for told in [*ranks, looked[60:]]]
        worst = {name: max((each[name] for each in grown if each), default=None) for name in ALLOWED}
        wrong += [f"{name} grew by {worst[name]}" for name, most in ALLOWED.items() if (worst[name] or 0) > most]
        held = [line["held"] for told in [*ranks, looked] for line in told if "held" in line]
        most = {name: max((each[name] for each in held), default=0) for name in MOST}
        wrong += [f"a process held {most[name]} {name}" for name, limit in MOST.items() if most[name] > limit]
        wrong += self._unshown(facts, worst)
        return {
            "seconds": round(seconds),
            "done": dict(self.done),
            "commits_reported": len(committed),
            "resumes": len(resumed),
            "looks_at_the_latest": len(looked),
            "looks_while_unavailable": sum("unavailable" in line for line in looked),
            "most_objects": max(self.objects, default=None),
            "objects_at_the_end": self.objects[-1] if self.objects else None,
            "uploads_left": len(left),
            "grew_at_most": worst,
            "held_at_most": most,
            **facts,
            "wrong": wrong,
        }


def growth(held: list[Mapping[str, float]]) -> dict[str, float]:
    """Return by how much the least of each measure in the last third is above that in the first."""
    third = len(held) // 3
    if third < 2:  # noqa: PLR2004  (too few say nothing)
        return {}
    first, last = held[:third], held[-third:]
    return {name: round(min(each[name] for each in last) - min(each[name] for each in first), 1) for name in ALLOWED}
