"""Every drill on every server, through every engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from limited import Limited
from places import at, on

from ckptstore.drills.catalog import ALL, DRILLS, named
from ckptstore.drills.runner import Conduct, run_drills
from ckptstore.errors import AccessDeniedError
from ckptstore.objectstore.urls import open_store

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


@pytest.mark.servers
def test_what_the_readme_grants_is_enough():
    """The role may do what a drill does, and nothing to the run beside it."""
    readme = (Path(__file__).parents[2] / "ckptstore" / "drills" / "README.md").read_text()
    (granted,) = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    with Limited() as server:
        statements = json.loads(granted.replace(":::bucket", f":::{server.bucket}"))
        who = {"AWS": "arn:aws:iam::ACCOUNT_ID:role/TRAINER"}
        policy = [{"Sid": f"Drill{at}", "Principal": who, **each} for at, each in enumerate(statements)]
        server.set_policy({"Version": "2012-10-17", "Statement": policy})
        url, options = server.url("runs/drills"), server.options_of("trainer")
        report = run_drills(url, named("lost-latest"), conduct=Conduct("s3fs", options))
        assert report.verdicts["lost-latest"].status == "passed", report.verdicts
        assert report.left_behind == ()
        with pytest.raises(AccessDeniedError):
            open_store(url, engine="s3fs", storage_options=options).put("latest.json", b"")
