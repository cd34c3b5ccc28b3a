"""Each invariant of the protocol is cited where it is kept and where it is tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT_LATER = {9}  # borrowing


def citations(*folders):
    texts = [path.read_text(encoding="utf-8") for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {int(number) for text in texts for number in re.findall(r"\bI([0-9]{1,2})\b", text)}


@pytest.mark.parametrize("folders", [("ckptstore", "storage_writers"), ("tests",)], ids=["code", "tests"])
def test_every_invariant_is_cited(folders):
    assert set(range(1, 18)) - KEPT_LATER <= citations(*folders)


def test_the_protocol_states_every_invariant():
    text = (ROOT / "ckptstore/protocol/PROTOCOL.md").read_text(encoding="utf-8")
    assert {int(number) for number in re.findall(r"^\| I([0-9]{1,2}) \|", text, re.MULTILINE)} == set(range(1, 18))
