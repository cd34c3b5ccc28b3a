"""A reply that is lost on the way changes nothing: what was done is found out, and done and reported once."""

import pytest
from places import on

from ckptstore.events import Claimed, HintFailed
from localstack.faults import DropReply, Reset

EVERYWHERE = ["obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto", "gcsfs-fakegcs"]
CREATED = ["run.json", "log/000000000000.json", "/part-00000.json.gz", "log/000000000001.json"]


def told_once(scene):
    """Return whether the observer heard of one claim and one commit, each at its slot, and of no fault."""
    claims = [event.seq for event in scene.told if isinstance(event, Claimed)]
    failed = [event for event in scene.told if isinstance(event, HintFailed)]
    return (claims, scene.committed, failed) == ([0], [("step-1", 1)], [])


@on(*EVERYWHERE)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_save_each_of_whose_creates_loses_its_reply_is_committed_once(scene, times):
    """I5, I16. The second and the third reply that is lost is that of a read-back."""
    tap, rules = scene.upon("put", "|".join(CREATED), DropReply(), times=times)
    scene.save(1, scene.writer(tap))
    assert [rule.hits for rule in rules.values()] == [times] * len(CREATED)
    assert told_once(scene)
    assert scene.log() == ["CLAIM 1", "COMMIT 1"]
    scene.check("step-1")


@on(*EVERYWHERE)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_save_each_of_whose_creates_is_reset_before_it_arrives_is_committed_once(scene, times):
    """I5, I16."""
    tap, rules = scene.upon("put", "|".join(CREATED), Reset(), times=times)
    scene.save(1, scene.writer(tap))
    assert [rule.hits for rule in rules.values()] == [times] * len(CREATED)
    assert told_once(scene)
    assert scene.log() == ["CLAIM 1", "COMMIT 1"]
    scene.check("step-1")
