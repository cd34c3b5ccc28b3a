"""How the store is reached: `--engine` and `--option`, which belong to no command and may stand anywhere."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from ckptstore.errors import InvalidInputError
from ckptstore.options import LogOptions
from ckptstore.store import CheckpointStore

NAMES = ("--engine", "--option", "-o")

Engine = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="What moves the bytes: obstore, s3fs, gcsfs, fsspec.")
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="One of the store's storage_options, as often as needed; client_kwargs.verify=/ca.pem reaches inside. "
        "Secrets belong in the environment.",
    ),
]


@dataclass(frozen=True, slots=True)
class Access:
    """What was said about the way to the store."""

    engine: str | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)


_said = Access()


def keep(engine: str | None, options: Sequence[str]) -> None:
    """Keep what was said, for the one command of this process.

    Raises:
        InvalidInputError: An option is not NAME=VALUE, or is said twice.
    """
    global _said  # noqa: PLW0603  (a command is a process)
    nested: dict[str, Any] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not all(name.split(".")):
            raise InvalidInputError(  # the text is not shown: it could be a secret
                "An --option is not NAME=VALUE.", hint="Write --option region_name=eu-west-1, say."
            )
        *above, last = name.split(".")
        place = nested
        for key in above:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise InvalidInputError(f"--option {name} is inside of a value.", hint="Say it once.")
        if last in place:
            raise InvalidInputError(f"--option {name} is said twice.", hint="Say it once.")
        place[last] = _value(last, value)
    _said = Access(engine, nested)


def said() -> Access:
    """Return what was said."""
    return _said


def open_run(url: str, *, log: LogOptions | None = None) -> CheckpointStore:
    """Return the run at `url`. See `CheckpointStore.open`."""
    return CheckpointStore.open(url, engine=_said.engine, storage_options=_said.storage_options, log=log)


def moved_to_the_front(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with what is said about the store before the command, where it is looked for."""
    front: list[str] = []
    rest: list[str] = []
    left = list(arguments)
    while left and left[0] != "--":
        taken = front if left[0].partition("=")[0] in NAMES else rest
        taken.append(left.pop(0))
        if taken is front and "=" not in front[-1] and left:
            front.append(left.pop(0))
    return [*front, *rest, *left]


def _value(name: str, text: str) -> Any:
    """Return true, false, null and a number of seconds as what they are, and all else as text: a key may be digits."""
    if text.lower() in ("true", "false", "null"):
        return json.loads(text.lower())
    if name.endswith("timeout"):
        with contextlib.suppress(ValueError):
            return float(text)
    return text
