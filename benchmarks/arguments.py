"""The arguments that the benchmarks share."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ckptstore.units import GIB, KIB, MIB

_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB}


def parser(
    name: str, description: str | None, *, size: str = "1G", sized: bool = True, rounds: int = 5
) -> argparse.ArgumentParser:
    """Return a parser with what most benchmarks take; `--size` only of those that are `sized`."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=description)
    if sized:
        made.add_argument("--size", type=nbytes, default=nbytes(size), help=f"of the state: 64M, 1G. [{size}]")
    made.add_argument("--rounds", type=count, default=rounds, help=f"each peer is measured so often. [{rounds}]")
    made.add_argument("--peers", type=lambda text: text.split(","), help="names, joined by commas. [all]")
    made.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one measurement. [600]")
    made.add_argument("--results", type=Path, metavar="FOLDER", help="instead of benchmarks/results")
    return made


def count(text: str) -> int:
    """Return a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on.")
    return int(text)


def nbytes(text: str) -> int:
    """Return the number of bytes that `64M`, say, stands for."""
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 64M or 1G.")
    return int(match[1]) * _UNITS[match[2]]
