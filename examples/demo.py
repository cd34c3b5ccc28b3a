"""The main job, run for real: ranks train, one is killed in the middle of a save, fewer ranks go on.

python -m examples.demo --store file      (or: make demo)
python -m examples.demo --store s3        (or: make demo STORE=s3; starts an S3 server on this machine)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
STEPS, SAVE_EVERY, KILL_STEP = 40, 5, 20


@contextlib.contextmanager
def a_store(kind: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the run's URL and the environment that reaches it; everything is removed afterwards."""
    if kind == "file":
        folder = tempfile.mkdtemp(prefix="ckptstore-demo-")
        try:
            yield f"{folder}/runs/gpt", {}
        finally:
            shutil.rmtree(folder)
        return
    from localstack.seaweedfs import SeaweedFS  # noqa: PLC0415  (only this choice needs a server)

    with SeaweedFS() as server:
        yield f"s3://{server.bucket}/runs/gpt", server.environment


def train(url: str, environment: dict[str, str], *, ranks: int, extra: tuple[str, ...] = ()) -> dict[int, float]:
    """Run the training script under torchrun, echo what it prints, and return the loss by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(HERE / "train_gpt.py"), url, f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", *extra]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), **environment}
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


def show(*command: str, environment: dict[str, str]) -> None:
    """Run one command of ours and let it print."""
    print(f"\n$ ckptstore {' '.join(command)}", flush=True)
    variables = {**os.environ, "PYTHONPATH": str(HERE.parent), **environment}
    subprocess.run([sys.executable, "-m", "ckptstore.cli", *command], env=variables, check=True)  # noqa: S603


def main() -> int:
    """Run the demo; exit with 1 if the resumed run did not go on where the committed one stood."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=["file", "s3"], default="file")
    store, began = parser.parse_args().store, time.monotonic()
    with a_store(store) as (url, environment):
        print(f"1. Four ranks train and save to {url}; rank 2 is killed in the save of step {KILL_STEP}.")
        before = train(url, environment, ranks=4, extra=("--kill-rank=2", f"--kill-step={KILL_STEP}"))
        print("\n2. What the store holds now: what is committed, what is ignored, and why.")
        show("ls", url, "--all", environment=environment)
        print("\n3. Three ranks go on from the newest committed checkpoint.")
        after = train(url, environment, ranks=3)
        show("ls", url, "--all", environment=environment)
        show("verify", url, "--level", "full", environment=environment)
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
