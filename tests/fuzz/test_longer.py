"""The same tests with twenty times as many examples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["test_logs.py", "test_objects.py", "test_values.py"])
def test_twenty_times_as_many_examples(name):
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=3000", str(HERE / name)],
        env={**os.environ, "FUZZ_TIMES": "20"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
