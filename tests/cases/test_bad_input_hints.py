"""Whatever goes wrong, the error says what to do next, and what it says can be done."""

import ast
from functools import cache
from pathlib import Path

import pytest
from refusals import check_hint

import ckptstore
import storage_writers
from ckptstore.cli.app import CLICK_ERROR
from ckptstore.errors import CkptStoreError

SOURCES = [Path(package.__file__).parent for package in (ckptstore, storage_writers)]


def all_kinds(kind=CkptStoreError):
    return [kind, *(each for below in kind.__subclasses__() for each in all_kinds(below))]


@cache
def texts():
    """Return every text in the sources that speaks of a command, with `X` for what is filled in."""
    found = {}
    for path in (path for source in SOURCES for path in source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) and isinstance(part.value, str) else "X"
                for part in parts
            )
            if "`ckptstore " in text and not text.startswith("X"):
                found[f"{path.name}:{node.lineno}"] = text
    return found


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
def test_every_kind_of_error_has_a_usual_hint_of_its_own_that_can_be_followed(kind):
    assert "usual_hint" in vars(kind)
    error = kind("what happened")
    assert error.hint == kind.usual_hint
    assert str(error) == f"what happened {kind.usual_hint}"
    check_hint(error.hint)
    assert kind("x", hint="Better.").hint == "Better."


@pytest.mark.parametrize("where", texts())
def test_every_command_that_a_text_names_exists_with_its_options(where):
    check_hint(texts()[where])


def test_a_hint_with_a_command_that_does_not_exist_would_be_found():
    for wrong in (
        "Run `ckptstore lst URL`.",
        "Run `ckptstore ls URL --every`.",
        "Run `ckptstore verify URL --level x`.",
    ):
        with pytest.raises((KeyError, AssertionError, CLICK_ERROR)):
            check_hint(wrong)
