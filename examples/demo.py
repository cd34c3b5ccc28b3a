"""The main job, run for real: ranks train, one is killed in the middle of a save, fewer ranks go on.

python -m examples.demo --store file      (or: make demo)
python -m examples.demo --store s3        (or: make demo STORE=s3; starts an S3 server on this machine)
python -m examples.demo --store s3fs      (the same by another engine)
python -m examples.demo --store gcs       (starts a server that speaks Google's API)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
STEPS, SAVE_EVERY, KILL_STEP = 40, 5, 20


@dataclass(frozen=True)
class Place:
    """Where the run is.

    Args:
        url: Its root.
        engine: What moves the bytes; None: what is usual for the URL.
        environment: What a process finds in its environment so that it reaches the store.
    """

    url: str
    engine: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """What both the script and the command are told besides the URL."""
        return [f"--engine={self.engine}"] if self.engine else []


@contextlib.contextmanager
def a_store(kind: str) -> Iterator[Place]:
    """Yield where the run is to be; everything is removed afterwards."""
    if kind == "file":
        with tempfile.TemporaryDirectory(prefix="ckptstore-demo-") as folder:
            yield Place(f"{folder}/runs/gpt")
        return
    from localstack.fake_gcs import FakeGcs  # noqa: PLC0415  (only these choices need a server)
    from localstack.seaweedfs import SeaweedFS  # noqa: PLC0415  (the same)

    with FakeGcs() if kind == "gcs" else SeaweedFS() as server:
        yield Place(server.url("runs/gpt"), "s3fs" if kind == "s3fs" else None, server.environment)


def train(place: Place, *, ranks: int, extra: tuple[str, ...] = ()) -> dict[int, float]:
    """Run the training script under torchrun, echo what it prints, and return the loss by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(HERE / "train_gpt.py"), place.url, *place.arguments]
    command += [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", *extra]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), **place.environment}
    losses: dict[int, float] = {}
    with subprocess.Popen(  # noqa: S603  (our own script)
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None  # noqa: S101  (PIPE was asked for)
        for line in job.stdout:
            if match := re.match(r"step +(\d+)  loss ([0-9.]+)", line):
                losses[int(match[1])] = float(match[2])
            if re.match(r"step|saved|resumed|nothing", line) or "Signal 9" in line:
                print("   ", line.rstrip(), flush=True)
    return losses


def show(place: Place, name: str, *more: str) -> None:
    """Run one command of ours and let it print."""
    command = [name, place.url, *more, *place.arguments]
    print(f"\n$ ckptstore {' '.join(command)}", flush=True)
    variables = {**os.environ, "PYTHONPATH": str(HERE.parent), **place.environment}
    subprocess.run([sys.executable, "-m", "ckptstore.cli", *command], env=variables, check=True)  # noqa: S603


def main() -> int:
    """Run the demo; exit with 1 if the resumed run did not go on where the committed one stood."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=["file", "s3", "s3fs", "gcs"], default="file")
    store, began = parser.parse_args().store, time.monotonic()
    with a_store(store) as place:
        print(f"1. Four ranks train and save to {place.url}; rank 2 is killed in the save of step {KILL_STEP}.")
        before = train(place, ranks=4, extra=("--kill-rank=2", f"--kill-step={KILL_STEP}"))
        print("\n2. What the store holds now: what is committed, what is ignored, and why.")
        show(place, "ls", "--all")
        print("\n3. Three ranks go on from the newest committed checkpoint.")
        after = train(place, ranks=3)
        show(place, "ls", "--all")
        show(place, "verify", "--level", "full")
        both = sorted(before.keys() & after.keys())
        print("\n4. The loss of the steps that both runs did (four ranks, three ranks, difference):")
        for step in both:
            print(f"    step {step:3d}   {before[step]:.4f}   {after[step]:.4f}   {after[step] - before[step]:+.4f}")
        expected = list(range(KILL_STEP - SAVE_EVERY + 1, KILL_STEP + 1))
        whole = max(after, default=0) == STEPS and both == expected
        close = all(abs(after[step] - before[step]) < 0.01 for step in both)  # noqa: PLR2004  (a hundredth of a nat)
    print(f"\n{'As promised' if whole and close else 'NOT as promised'}, in {time.monotonic() - began:.0f} s.")
    return 0 if whole and close else 1


if __name__ == "__main__":
    sys.exit(main())
