"""A reply that is lost on the way changes nothing: what was done is found out, and done and reported once."""

import pytest
from places import on

from ckptstore.events import Claimed, HintFailed
from localstack.faults import DropReply, Reset, ResetMidBody

EVERYWHERE = ["obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto", "gcsfs-fakegcs"]
CREATED = ["run.json", "log/000000000000.json", "/part-00000.json.gz", "log/000000000001.json"]


def told_once(scene):
    """Return whether the observer heard of one claim and one commit, each at its slot, and of no fault."""
    claims = [event.seq for event in scene.told if isinstance(event, Claimed)]
    failed = [event for event in scene.told if isinstance(event, HintFailed)]
    return (claims, scene.committed, failed) == ([0], [("step-1", 1)], [])


@on(*EVERYWHERE)
@pytest.mark.parametrize("times", [1, 3])
def test_a_save_each_of_whose_creates_loses_its_reply_is_committed_once(scene, times):
    """I5, I16. The second and the third reply that is lost is that of a read-back."""
    tap, rules = scene.upon("put", "|".join(CREATED), DropReply(), times=times)
    scene.save(1, scene.writer(tap))
    assert [rule.hits for rule in rules.values()] == [times] * len(CREATED)
    assert told_once(scene)
    assert scene.log() == ["CLAIM 1", "COMMIT 1"]
    scene.check("step-1")


@on(*EVERYWHERE)
@pytest.mark.parametrize("times", [1, 3])
def test_a_save_each_of_whose_creates_is_reset_before_it_arrives_is_committed_once(scene, times):
    """I5, I16."""
    tap, rules = scene.upon("put", "|".join(CREATED), Reset(), times=times)
    scene.save(1, scene.writer(tap))
    assert [rule.hits for rule in rules.values()] == [times] * len(CREATED)
    assert told_once(scene)
    assert scene.log() == ["CLAIM 1", "COMMIT 1"]
    scene.check("step-1")


UPLOADS = {
    "the beginning": {"method": "POST", "query": "^uploads"},
    "a part": {"method": "PUT", "query": "partNumber=2"},
    "the end": {"path": "rank-00000", "after": 4},
}


@on("obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto")
@pytest.mark.parametrize("which", UPLOADS)
@pytest.mark.parametrize("action", [DropReply(), Reset(), ResetMidBody(20)], ids=["lost", "reset", "broken off"])
def test_an_upload_in_parts_of_which_a_request_loses_its_reply_is_committed(scene, which, action):
    """The answer of the request that completes it, of a part, or of the one that begins it, twice in a row."""
    with scene.proxy.rule(action, times=2, **UPLOADS[which]) as rule:
        scene.save(1, megabytes=12)
    assert rule.hits == 2
    assert told_once(scene)
    scene.check("step-1")
    if which != "the beginning" or action == Reset():  # else nobody ever learned the upload's name
        assert scene.uploads() == []


@on("obstore-seaweedfs", "s3fs-seaweedfs")
@pytest.mark.parametrize("megabytes", [0, 6], ids=["in one request", "in parts"])
def test_an_upload_whose_object_cannot_be_looked_at_for_a_while_is_committed(scene, megabytes):
    """Each engine looks at what it has published: for the ETag, and because the answer may be that of a second try."""
    with scene.proxy.rule(DropReply(), method="HEAD", times=4) as rule:
        scene.save(1, megabytes=megabytes)
    assert rule.hits == 4
    assert told_once(scene)
    scene.check("step-1")


CHUNKS = {
    "the beginning": {"method": "POST", "query": "uploadType=resumable", "times": 2},
    "the second chunk": {"query": "upload_id=", "after": 1, "times": 1},
    "the second chunk, and how much there is": {"query": "upload_id=", "after": 1, "times": 2},
    "the last chunk": {"query": "upload_id=", "after": 2, "times": 1},
    "the last chunk, and how much there is": {"query": "upload_id=", "after": 2, "times": 2},
}


@on("gcsfs-book")
@pytest.mark.parametrize("which", CHUNKS)
@pytest.mark.parametrize("action", [DropReply(), Reset()], ids=["lost", "reset"])
def test_an_upload_in_chunks_of_which_a_request_loses_its_reply_is_committed(scene, which, action):
    with scene.proxy.rule(action, **CHUNKS[which]) as rule:
        scene.save(1, megabytes=12)
    assert rule.hits == CHUNKS[which]["times"]
    assert told_once(scene)
    scene.check("step-1")
