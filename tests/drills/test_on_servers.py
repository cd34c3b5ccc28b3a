"""Every drill on every server, through every engine."""

from __future__ import annotations

import pytest
from places import at, on

from ckptstore.drills.catalog import ALL, DRILLS, named
from ckptstore.drills.runner import Conduct, run_drills

SERVERS = ("obstore-seaweedfs", "s3fs-seaweedfs", "obstore-moto", "s3fs-moto", "gcsfs-fakegcs")


def drilled(place, drills):
    return run_drills(place.url, drills, conduct=Conduct(place.engine, place.options))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@on(*SERVERS)
def test_what_is_promised_holds_on(place):
    report = drilled(place, named(ALL))
    assert {name: verdict.seen for name, verdict in report.verdicts.items() if verdict.status == "failed"} == {}
    assert report.left_behind == ()
    assert [info.key for info in place.store().list("")] == []


@on("s3fs-rclone")
def test_a_store_that_ignores_conditions_is_refused_with_what_would_be_lost(place):
    report = drilled(place, DRILLS)
    assert {verdict.status for verdict in report.verdicts.values()} == {"refused"}
    assert "one checkpoint would be lost" in report.refusal.message
    assert report.left_behind == ()


@pytest.mark.parametrize("place", [at("memory"), at("fsspec-memory")], indirect=True)
def test_the_memory_of_one_process_is_no_place_for_drills(place):
    with pytest.raises(ValueError, match="the memory of one process"):
        drilled(place, DRILLS)
