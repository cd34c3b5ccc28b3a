"""What a refusal must be: typed, told in full, followed by something that can be done, and without any effect."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import typer.main
from typer.testing import CliRunner

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.cli.app import app
from ckptstore.cli.exits import exit_for
from ckptstore.errors import CkptStoreError
from ckptstore.objectstore.urls import open_store

SAVES = {"sw.save": sw.save, "dcp.save": dcp.save}
LOADS = {"sw.load": sw.load, "dcp.load": dcp.load}
COMMANDS = {
    "ls": ("ls",),
    "latest": ("latest",),
    "log": ("log",),
    "show": ("show",),
    "tree": ("tree",),
    "verify": ("verify", "--all", "--level", "full"),
}

_CLI = typer.main.get_command(app)
_COMMAND = re.compile(r"`ckptstore ([^`]+)`")


def told(work: Callable[[], object], kind: type[CkptStoreError], *names: str, seconds: float = 20) -> CkptStoreError:
    """Run `work`, which must fail in time with exactly `kind`, naming all of `names`; return the error."""
    began = time.monotonic()
    error = raised(work)
    assert time.monotonic() - began < seconds
    assert error is not None, f"nothing was refused, {kind.__name__} was expected"
    ours = sw.cause(error)
    assert ours is not None, f"{type(error).__name__} is none of ours: {error}"
    checked(ours, kind, *names)
    return ours


def raised(work: Callable[[], object]) -> BaseException | None:
    """Return what `work` raises, DCP's exception too, which is no Exception."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001  (see above)
        return error
    return None


def checked(error: CkptStoreError, kind: type[CkptStoreError], *names: str) -> None:
    """Check an error's type, code, what it names, and that its hint can be followed."""
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    assert error.code == kind.code
    said = f"{error.message} {error.facts}"
    assert [name for name in names if name not in said] == [], said
    assert json.loads(json.dumps(error.facts)) == error.facts
    check_hint(error.hint)


def check_hint(hint: str) -> None:
    """Check that a hint says something, and that every command in it exists with its options and arguments."""
    assert hint.strip()
    for command in _COMMAND.findall(hint):
        name, *arguments = shlex.split(command)
        if name.startswith("-"):
            assert name in ("--help", "--version")
            continue
        _CLI.commands[name].make_context(name, list(arguments))  # raises what a wrong usage is
        if "--level" in arguments:
            assert arguments[arguments.index("--level") + 1] in ("chain", "exists", "etag", "full")


def command(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Run a command in this process with `--json`, and return its exit code and its document."""
    name, *more = map(str, arguments)
    ended = CliRunner().invoke(app, [name, "--json", *more])
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return ended.exit_code, json.loads(ended.stdout)


def command_told(*arguments: object, kind: type[CkptStoreError], names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run a command that must fail as `kind`, with its exit code, and return its document."""
    code, document = command(*arguments)
    assert (code, document["error"]) == (exit_for(kind("x")), kind.code), document
    said = f"{document['message']} {document['facts']}"
    assert [name for name in names if name not in said] == [], said
    check_hint(document["hint"])
    return document


def contents(url: object) -> dict[str, bytes]:
    """Return every object at a root with its bytes."""
    store = open_store(str(url))
    return {info.key: store.get(info.key, max_bytes=1 << 28) for info in store.list("")}


@contextmanager
def nothing_written(url: object) -> Iterator[None]:
    """Check that the block leaves the store at `url` exactly as it was."""
    before = contents(url)
    yield
    assert contents(url) == before


def state() -> dict[str, Any]:
    """Return a small state of tensors and values."""
    return {
        "model": {"w": torch.arange(60_000.0).view(300, 200), "b": torch.arange(7)},
        "step": 5,
        "extra": {"name": "gpt", "shape": (1, 2)},
    }


def target() -> dict[str, Any]:
    """Return a target like `state` that holds none of its values."""
    return {
        "model": {"w": torch.full((300, 200), -1.0), "b": torch.full((7,), -1)},
        "step": -1,
        "extra": {"name": "", "shape": ()},
    }


def untouched(given: dict[str, Any], *, values: bool = True) -> bool:
    """Return whether a target is still what `target` returned. DCP's own planner forgets values, never tensors."""
    fresh = target()
    tensors = all(torch.equal(given["model"][key], tensor) for key, tensor in fresh["model"].items())
    return tensors and (not values or (given["step"], given["extra"]) == (fresh["step"], fresh["extra"]))


def save(url: object, name: object = "a", *, call: str = "sw.save", **options: Any) -> None:
    """Save `state` under a name."""
    SAVES[call](state(), checkpoint_id=name, storage_writer=sw.CkptStoreWriter(url, **options))


def load(url: object, into: dict[str, Any] | None = None, *, call: str = "sw.load", **options: Any) -> dict[str, Any]:
    """Load into a target and return it."""
    into = target() if into is None else into
    LOADS[call](into, storage_reader=sw.CkptStoreReader(url, **options))
    return into


def loaded(url: object, **options: Any) -> bool:
    """Return whether a load gives `state`."""
    found, right = load(url, **options), state()
    return all(torch.equal(found["model"][key], tensor) for key, tensor in right["model"].items()) and (
        found["step"],
        found["extra"],
    ) == (right["step"], right["extra"])


def refused_by_all_faces(url: object, kind: type[CkptStoreError], *names: str, commands: tuple[str, ...]) -> None:
    """Check that nobody reads or writes at `url`: both ways to load and save, the store, and these commands."""
    with nothing_written(url):
        for call in LOADS:
            into = target()
            told(lambda call=call, into=into: load(url, into, call=call), kind, *names)
            assert untouched(into)
        for call in SAVES:
            told(lambda call=call: save(url, "new", call=call), kind, *names)
        told(lambda: CheckpointStore.open(str(url)).latest(), kind, *names)
        told(lambda: CheckpointStore.open(str(url)).get("a"), kind, *names)
        for name in commands:
            command_told(COMMANDS[name][0], url, *COMMANDS[name][1:], kind=kind, names=names)
