"""One drill in a place of its own."""

import pytest

from ckptstore.drills.catalog import named
from ckptstore.drills.runner import Conduct, run_drills


@pytest.fixture
def drilled(tmp_path):
    """Run one drill, perhaps in a sabotaged product, and return its verdict; nothing is left behind."""

    def drilled(name, url=None, **conduct):
        report = run_drills(url or str(tmp_path / "run"), named(name), conduct=Conduct(**conduct))
        assert report.left_behind == ()
        return report.verdicts[name]

    return drilled
