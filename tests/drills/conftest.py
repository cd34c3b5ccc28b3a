"""One drill in a place of its own."""

import pytest

from ckptstore.drills.catalog import named
from ckptstore.drills.place import Place
from ckptstore.drills.runner import Conduct, run_drills


@pytest.fixture
def drilled(tmp_path):
    """Run one drill, perhaps in a sabotaged product, and return its verdict; nothing is left behind."""

    def drilled(name, url=None, **conduct):
        report = run_drills(url or str(tmp_path / "run"), named(name), conduct=Conduct(**conduct))
        assert report.left_behind == ()
        return report.verdicts[name]

    return drilled


@pytest.fixture
def ranks_are_quick(tmp_path):
    """Start a rank beforehand: the first one imports torch, which may take longer than a test's drill has."""
    with Place(str(tmp_path / "beforehand")).ranks(1, "sabotage:nothing") as ranks:
        ranks.results()
