"""The command line: what is in a run and why, and the few things that an operator changes in it."""

from __future__ import annotations

import sys

NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line and exit: the entry point `ckptstore`."""
    try:
        from ckptstore.cli.app import app  # noqa: PLC0415  (typer comes with an extra; its absence is told)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in NEEDED:
            raise
        sys.stderr.write(
            f"error: The command line needs {missing}, which is not installed.\n"
            "hint: Install it: pip install 'ckptstore[cli]'\n"
        )
        sys.exit(2)
    app()
