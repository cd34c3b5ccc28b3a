"""How the readers are fuzzed: the same inputs at every run, and twenty times as many in the slow set.

The samples beside these tests, and the small runs of the protocol's tests, are imported by their plain names.
"""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "protocol")]

EXAMPLES = 60 * int(os.environ.get("FUZZ_TIMES", "1"))
settings.register_profile(
    "fuzz",
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
