"""The transfer options that suit a store: the same as `ckptstore tune URL`, without a URL on a server of our own."""

from __future__ import annotations

import os

from benchmarks.rounds import Bucket
from ckptstore.cli.app import app


def main(argv: list[str]) -> int:
    """Run the benchmark; return its exit code."""
    if argv and not argv[0].startswith("-"):
        return _tune(argv)
    with Bucket() as place:
        os.environ.update(place.environment)  # of this process only, which ends with it
        return _tune([place.root(0), *argv])


def _tune(arguments: list[str]) -> int:
    code: int = app(["tune", *arguments], standalone_mode=False)
    return code
