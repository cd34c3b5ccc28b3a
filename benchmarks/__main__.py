"""`python -m benchmarks NAME [arguments]`: run one benchmark, `benchmarks/NAME.py`."""

from __future__ import annotations

import importlib
import os
import signal
import sys

NAMES = (
    "save",
    "load",
    "stall",
    "small",
    "reshard",
    "mlperf",
    "tune",
    "scale",
    "log",
    "soak",
    "endurance",
    "chaos",
    "drills",
    "model",
    "simulate",
    "faults",
    "report",
)


def main(arguments: list[str]) -> int:
    """Run the benchmark that is named first; return its exit code."""
    if not arguments or arguments[0] not in NAMES:
        print(f"usage: python -m benchmarks NAME [--help]\n\nNAME is one of: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    name, *rest = arguments
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as training sets it with several ranks on a machine
    code: int = importlib.import_module(f"benchmarks.{name}").main(rest)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was written is removed
    sys.exit(main(sys.argv[1:]))
