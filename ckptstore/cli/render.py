"""Printing: the only file that knows rich.

Text that comes from a store is foreign. It is never read as markup, and what a terminal would obey is escaped. Where
the output is no terminal there are no colours, no bars, and one line per row.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ckptstore.cli.exits import Exit

WIDE_COLUMNS = 100_000
FOLDED = ("NAME", "NOTES", "WHAT", "WHY", "KEY")
"""Columns of free text: on a terminal that is too narrow these are folded, never cut."""


def clean(text: object) -> str:
    """Return `text` with everything escaped that is not a printable character: a terminal obeys nothing in it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in str(text))


def print_json(document: Mapping[str, object]) -> None:
    """Print the one document of a command, all in ASCII; numbers that are not finite are text, as in the log."""
    _write(sys.stdout, json.dumps(_finite(document), indent=2, allow_nan=False) + "\n")


def print_line(text: str = "", *, style: str = "") -> None:
    """Print a line."""
    _print(sys.stdout, Text(clean(text), style=style))


def print_text(text: str) -> None:
    """Print what is to be taken into a file, line by line as it is."""
    for line in text.splitlines():
        print_line(line)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print rows in aligned columns.

    Args:
        headers: Of the columns.
        rows: One value per column; None is shown as `-`.
        right: Headers of the columns that are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(
            header,
            justify="right" if header in right else "left",
            no_wrap=header not in FOLDED or not sys.stdout.isatty(),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text("-" if value is None else clean(value)) for value in row))
    _print(sys.stdout, table)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one pair a line; what is empty is left out."""
    shown = {name: value for name, value in fields.items() if value not in (None, "", {}, [])}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        print_line(f"{name:<{width}}  {value}")


def print_warning(text: str) -> None:
    """Print what must not be overlooked, where it does not mix with the answer."""
    _print(sys.stderr, Text(clean(f"warning: {text}"), style="bold yellow"))


def print_note(text: str) -> None:
    """Print what is said beside the answer, where it does not mix with it."""
    _print(sys.stderr, Text(clean(text)))


def print_error(message: str, hint: str) -> None:
    """Print what went wrong, and what to do next."""
    _print(sys.stderr, Text(clean(f"error: {message}"), style="bold red"))
    if hint:
        _print(sys.stderr, Text(clean(f"hint: {hint}")))


@contextlib.contextmanager
def progress_of(title: str, *, wanted: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield what is to be told of bytes done and bytes in all. A bar is shown on a terminal only, if `wanted`."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=Console(file=sys.stderr), transient=True, disable=not (wanted and sys.stderr.isatty())
    ) as bar:
        task = bar.add_task(clean(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def status_of(title: str, *, wanted: bool) -> Iterator[Callable[[str], None]]:
    """Yield what is to be told of what is under way. It is shown on a terminal only, if `wanted`."""
    with Progress(
        TextColumn("{task.description}", markup=False),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not (wanted and sys.stderr.isatty()),
    ) as shown:
        task = shown.add_task(clean(title), total=None)
        yield lambda text: shown.update(task, description=clean(text))


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _print(stream: TextIO | None, what: Text | Table) -> None:
    terminal = stream is not None and stream.isatty()
    drawn, width = io.StringIO(), None if terminal else WIDE_COLUMNS
    console = Console(file=drawn, force_terminal=terminal, highlight=False, width=width)
    console.print(what, soft_wrap=isinstance(what, Text))
    _write(stream, "".join(f"{line.rstrip()}\n" for line in drawn.getvalue().split("\n")[:-1]))


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # it was closed before the program began
        raise SystemExit(Exit.PIPE)
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        # Whoever read has enough, or has no room. The interpreter flushes once more at its exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError) and stream is not sys.stderr:
            print_error(f"The answer cannot be written: {error.strerror}. What was asked for may be done.", "")
        raise SystemExit(Exit.PIPE) from None
