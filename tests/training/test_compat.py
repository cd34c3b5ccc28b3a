"""The compatibility matrix: what may be resumed where, and what would open what may not."""

from __future__ import annotations

import sys

import pytest

from ckptstore import IncompatibleStateError, InvalidInputError
from ckptstore.training.compat import MAX_LEVELS, MAX_MATRIX_BYTES, Matrix

EXAMPLE = """
resume_compatibility:
  - from: {dp: 8, tp: 8, pp: 1, zero: 1}
    to: {dp: 6, tp: 8, pp: 1, zero: 1}
    status: verified
  - from: {dp: 8, tp: 8, pp: 1, zero: 1}
    to: {dp: 4, tp: 16, pp: 1, zero: 1}
    status: verified
    evidence: reports/drill-7.json
  - from: {dp: 8, tp: 8, pp: 1, zero: 1}
    to: {dp: 16, tp: 4, pp: 1, zero: 1}
    status: blocked_until_drill_passes
  - from: {dp: 8, tp: 8}
    to: {dp: 7, tp: 8}
    status: forbidden
"""
SAVED = {"dp": 8, "tp": 8, "pp": 1, "zero": 1}


def now(**degrees):
    return {**SAVED, **degrees}


@pytest.mark.parametrize("how", ["text", "path", "name", "values", "list"])
def test_a_matrix_is_read_from_a_file_from_text_or_from_values(tmp_path, how):
    path = tmp_path / "matrix.yaml"
    path.write_text(EXAMPLE)
    entries = [{"from": {"tp": 2}, "to": {"tp": 1}, "status": "verified", "evidence": "e"}]
    source = {
        "text": EXAMPLE,
        "path": path,
        "name": str(path),
        "values": {"resume_compatibility": entries},
        "list": entries,
    }[how]
    matrix = Matrix.read(source)
    assert len(matrix.entries) == (1 if how in ("values", "list") else 4)
    assert matrix.entries[0].status == "verified"


def test_the_same_topology_is_category_0_whatever_is_left_unsaid():
    decision = Matrix.read(EXAMPLE).decide({"dp": 2}, {"dp": 2, "tp": 1, "pp": 1, "zero": 0, "fsdp": 1, "cp": 1})
    assert (decision.category, decision.status, decision.is_open) == (0, "same", True)
    assert str(decision) == "category 0, the same topology"


@pytest.mark.parametrize(
    ("saved", "later"),
    [
        ({"dp": 4, "fsdp": 4, "zero": 3}, {"dp": 3, "fsdp": 3, "zero": 3}),
        ({"dp": 4}, {"dp": 5}),
        ({"dp": 8, "fsdp": 8, "zero": 3}, {"dp": 8, "fsdp": 4, "zero": 3}),
        (SAVED, now(dp=5)),
    ],
)
def test_another_number_of_data_parallel_ranks_is_category_1_and_allowed(saved, later):
    for matrix in (Matrix(), Matrix.read(EXAMPLE)):
        decision = matrix.decide(saved, later)
        assert (decision.category, decision.status, decision.is_open) == (1, "allowed", True)


def test_an_entry_says_more_of_a_change_of_data_parallelism_than_the_rule():
    matrix = Matrix.read(EXAMPLE)
    assert matrix.decide(SAVED, now(dp=6)).status == "verified"
    with pytest.raises(IncompatibleStateError, match="forbidden") as caught:
        matrix.decide({"dp": 8, "tp": 8}, {"dp": 7, "tp": 8})
    assert "forbids" in caught.value.hint
    assert matrix.decide(SAVED, now(dp=7)).status == "allowed"  # zero 1: of that it does not speak


@pytest.mark.parametrize(
    "later",
    [now(dp=2, tp=32), now(dp=4, pp=2), now(zero=3, fsdp=8), now(dp=4, cp=2), now(dp=16, tp=4)],
    ids=str,
)
def test_any_other_change_needs_a_verified_entry_and_the_drill_is_named(later):
    with pytest.raises(IncompatibleStateError) as caught:
        Matrix.read(EXAMPLE).decide(SAVED, later)
    assert caught.value.facts["category"] == 2
    assert caught.value.hint.startswith("Run `ckptstore drill reshard URL --from dp=8,tp=8,pp=1,zero=1,fsdp=1 --to dp=")


def test_a_verified_entry_with_evidence_opens_category_2():
    decision = Matrix.read(EXAMPLE).decide(SAVED, now(dp=4, tp=16))
    assert (decision.category, decision.status, decision.evidence) == (2, "verified", "reports/drill-7.json")
    assert decision.is_open
    assert str(decision).endswith("verified (reports/drill-7.json)")
    with pytest.raises(IncompatibleStateError):  # the way back was not tried
        Matrix.read(EXAMPLE).decide(now(dp=4, tp=16), SAVED)


def test_a_verified_entry_without_evidence_opens_nothing():
    matrix = Matrix.read([{"from": {"tp": 2}, "to": {"tp": 1, "dp": 2}, "status": "verified"}])
    with pytest.raises(IncompatibleStateError) as caught:
        matrix.decide({"tp": 2}, {"dp": 2})
    assert "no evidence" in caught.value.hint


def test_an_entry_that_names_no_fsdp_speaks_of_every_width():
    matrix = Matrix.read([{"from": {"dp": 8, "zero": 3}, "to": {"dp": 4, "zero": 3}, "status": "forbidden"}])
    assert not matrix.judge({"dp": 8, "fsdp": 8, "zero": 3}, {"dp": 4, "fsdp": 2, "zero": 3}).is_open


def test_of_several_entries_the_strictest_counts():
    change = {"from": {"tp": 2, "fsdp": 1}, "to": {"tp": 1, "dp": 2}}
    matrix = Matrix.read(
        [
            {**change, "status": "verified", "evidence": "e"},
            {"from": {"tp": 2}, "to": {"tp": 1, "dp": 2}, "status": "forbidden"},
        ]
    )
    assert matrix.judge({"tp": 2}, {"dp": 2}).status == "forbidden"


ENTRY = {"from": {"dp": 2}, "to": {"dp": 1}, "status": "verified"}


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "resume_compatibility: 5",
        "resume: []",
        "a: [b",
        "x: &x [1]\nresume_compatibility: *x",
        "resume_compatibility: []\nresume_compatibility: []",
        "resume_compatibility:\n- {from: {dp: 8, dp: 4}, to: {dp: 1}, status: verified}",
        "!!python/object/apply:os.getcwd []",
        "[" * 5000,
        "nowhere/matrix.yaml",
        5,
        [5],
        [{"from": {"dp": 2}, "to": {"dp": 1}}],
        [{**ENTRY, "status": "ok"}],
        [{**ENTRY, "because": "I say so"}],
        [{**ENTRY, "evidence": ""}],
        [{**ENTRY, "evidence": 5}],
        [{**ENTRY, "from": {}}],
        [{**ENTRY, "from": {"dp": 0}}],
        [{**ENTRY, "from": {"dp": "8"}}],
        [{**ENTRY, "from": {"dp": True}}],
        [{**ENTRY, "to": {"zero": -1}}],
        [{**ENTRY, "to": {1: 1}}],
        [ENTRY, {**ENTRY, "status": "forbidden"}],
        [ENTRY, {"from": {"dp": 2, "tp": 1}, "to": {"dp": 1, "pp": 1}, "status": "verified"}],
        "#" * (MAX_MATRIX_BYTES + 1),
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_what_is_no_matrix_is_refused(wrong):
    with pytest.raises(InvalidInputError, match=r"[Mm]atrix"):
        Matrix.read(wrong)


@pytest.mark.parametrize("level", ["[", "- ", "? ", "{a: ", "[a,\n"])
def test_many_levels_are_refused_also_where_python_would_go_deeper(level):
    """Each one costs as many steps as there are, and a program may have raised Python's own limit."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        with pytest.raises(InvalidInputError, match=f"more than {MAX_LEVELS} levels"):
            Matrix.read(f"{level * 3000}\n")
    finally:
        sys.setrecursionlimit(limit)


def test_what_is_wrong_with_which_entry_is_named():
    with pytest.raises(InvalidInputError, match=r"entry 2, to: 'tp' cannot be 0"):
        Matrix.read([ENTRY, {**ENTRY, "to": {"tp": 0}}])
