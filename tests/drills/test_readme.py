"""What the README says of the drills is what there is."""

from __future__ import annotations

from pathlib import Path

from ckptstore.drills import degrees
from ckptstore.drills.catalog import DRILLS, table

README = (Path(__file__).parents[2] / "ckptstore" / "drills" / "README.md").read_text()


def test_the_list_of_drills_is_the_catalog():
    """Where it fails: print(ckptstore.drills.catalog.table()) is what belongs there."""
    assert table() in README


def test_drills_have_names_and_numbers_of_their_own():
    assert sorted({drill.number for drill in DRILLS}) == [drill.number for drill in DRILLS]
    assert len({drill.name for drill in DRILLS}) == len(DRILLS)


def test_the_limits_of_reshard_are_those_that_are_named():
    named = (degrees.HIDDEN, degrees.BLOCKS, degrees.BATCH, degrees.MAX_RANKS, degrees.STAGES_OF_ZERO)
    assert named == (24, 4, 48, 64, (0, 2, 3))
    for text in ("does not divide 24", "`pp` above 4", "`dp` above 48", "more than 64 ranks", "`zero` 1"):
        assert text in README
