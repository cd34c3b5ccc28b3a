"""The bounded model of the protocol breaks nothing within small bounds, and each weakened one is found out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import __main__ as entry
from benchmarks.commit_model.explore import explore
from benchmarks.commit_model.invariants import CHECKED, NOT_MODELLED
from benchmarks.commit_model.runs import LARGE, MUTANTS, SMALL


@pytest.mark.parametrize("name", SMALL)
def test_no_state_within_the_bounds_breaks_an_invariant(name):
    """I1, I2, I3, I4, I5, I6, I7, I8, I10, I11, I12, I14, I15, I16, I17."""
    found = explore(SMALL[name])
    assert (found.broken, found.complete) == ("", True), "\n".join(found.trace)
    assert found.states > 400


@pytest.mark.parametrize("name", MUTANTS)
def test_a_weakened_protocol_is_found_out(name):
    mutant = MUTANTS[name]
    found = explore(mutant.setting)
    assert found.broken.partition(":")[0] == mutant.finds
    assert 0 < len(found.trace) <= 25


def test_every_invariant_is_asked_or_it_is_said_why_not():
    protocol = Path(__file__).parents[2] / "ckptstore" / "protocol" / "PROTOCOL.md"
    stated = set(re.findall(r"^\| (I[0-9]+) \|", protocol.read_text(), re.MULTILINE))
    assert {*CHECKED, *NOT_MODELLED} == stated | {"COLLECTED"}
    assert SMALL.keys() <= LARGE.keys()


def test_the_report_says_what_was_found(tmp_path, capsys):
    names = ["a collection", "no superseding"]
    assert entry.main(["model", "--small", "--results", str(tmp_path), "--only", *names]) == 0
    document = json.loads((tmp_path / "model.json").read_text())
    right, weakened = document["rows"]
    assert document["about"]["states"] == right["states"] > 400
    assert document["about"]["states_with_something_to_break"]["I8"] > 100
    assert (weakened["finds"], weakened["trace"][-1].split()[:2]) == ("I7", ["store", "takes"])
    assert "| a collection |" in (tmp_path / "MODEL.md").read_text()
    assert entry.main(["model", "--limit", "100", "--results", str(tmp_path), "--only", "a collection"]) == 1
    assert "the limit was reached" in capsys.readouterr().out
