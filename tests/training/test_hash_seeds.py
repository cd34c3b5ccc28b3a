"""Ranks are processes of their own, in which sets have other orders: what they save must not."""

import json
import os
import subprocess
import sys
from pathlib import Path

from trainings import Training

TESTS = Path(__file__).parents[1]
PROGRAM = "import json, test_hash_seeds; print(json.dumps(test_hash_seeds.digests()))"


def digests():
    """Return what tells apart what ranks must hold alike, after two steps."""
    training = Training()
    training.train(2)
    return training.state.capture(0, 1).digests


def test_two_processes_that_hash_otherwise_save_the_same_bytes():
    paths = os.pathsep.join(map(str, (TESTS.parent, TESTS, Path(__file__).parent)))
    said = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    one, other = map(json.loads, said)
    assert one == other
    assert set(one) == {"model", "optimizer", "scheduler", "scaler", "sampler", "extras", "progress"}
