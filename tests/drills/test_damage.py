"""Drills 2, 3 and 4: something that was saved is gone or changed."""

from __future__ import annotations

import pytest

from ckptstore import CheckpointStore


@pytest.mark.parametrize("name", ["deleted-shard", "tampered-bytes", "lost-latest"])
def test_what_is_promised_holds(drilled, name):
    verdict = drilled(name)
    assert verdict.status == "passed", verdict.seen


@pytest.mark.parametrize(
    ("name", "sabotage", "seen"),
    [
        ("deleted-shard", "no_fallback", "is missing"),
        ("tampered-bytes", "no_hashes", "resumed from step 4, not from 2"),
    ],
)
def test_a_product_that_does_not_keep_it_fails(drilled, name, sabotage, seen):
    verdict = drilled(name, prepare=f"sabotage:{sabotage}")
    assert verdict.status == "failed"
    assert seen in verdict.seen


def test_a_hint_that_is_believed_fails(drilled, monkeypatch):
    monkeypatch.setattr(CheckpointStore, "latest", lambda self: self.get(seq=self.lost_from))
    verdict = drilled("lost-latest")
    assert verdict.status == "failed"
    assert "NotFoundError" in verdict.seen
