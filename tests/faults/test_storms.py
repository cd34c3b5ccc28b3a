"""Servers that refuse for a while, or for ever: requests are tried again with pauses, up to a limit, and no further."""

import functools
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from places import on, place_at
from scenes import at_once, transfer

import storage_writers as sw
from ckptstore.errors import UnavailableError
from ckptstore.options import RetryOptions
from ckptstore.protocol.capable import PROBED, place_of
from localstack.faults import Answer, DropReply, Reset, s3_error

STORM_SECONDS = 20
STORMY = RetryOptions(
    attempts=12, first_pause_seconds=0.4, longest_pause_seconds=2, deadline_seconds=60, stall_timeout_seconds=20
)
"""Retry-After says one second, which is less than the longest pause."""
SLACK_SECONDS = 8  # others use this machine, too
ENGINES = ["obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-book"]


def pauses_after(scene, status):
    """Return the seconds between each refusal with this status and the next try of the same request."""
    seen = sorted(scene.proxy.seen, key=lambda each: (each.method, each.path, each.query, each.at))
    by_request = itertools.groupby(seen, key=lambda each: (each.method, each.path, each.query))
    return [
        later.at - earlier.at
        for _, tries in by_request
        for earlier, later in itertools.pairwise(tries)
        if earlier.status == status
    ]


def save_through_the_storm(scene, seconds):
    """Save again and again, until the storm is over and once more; return the names."""
    slow_down, too_many = scene.refusal(503, "SlowDown"), scene.refusal(429, "TooManyRequests")
    too_many = Answer(too_many.status, too_many.body, {**too_many.headers, "Retry-After": "1"})
    writer, over = scene.writer(moves=transfer(STORMY)), time.monotonic() + seconds
    with (
        scene.proxy.rule(slow_down, share=0.15, seconds=seconds) as slowed,
        scene.proxy.rule(too_many, share=0.15, seconds=seconds) as refused,
    ):
        for step in itertools.count(1):
            is_last = time.monotonic() > over
            scene.save(step, writer, megabytes=6)
            if is_last:
                break
            time.sleep(0.2)
    assert min(slowed.hits, refused.hits) >= 3
    return [f"step-{each}" for each in range(1, step + 1)]


@pytest.mark.servers
@pytest.mark.timeout(200)
def test_in_a_storm_of_refusals_every_save_ends_well_and_a_server_is_left_alone_as_it_asks(request, scene_at):
    """30 % of all requests are refused for 20 seconds, half of them with Retry-After."""
    scenes = {name: scene_at(place_at(name, request)) for name in ENGINES}
    saved = {}

    def save(name):
        saved[name] = save_through_the_storm(scenes[name], STORM_SECONDS)

    at_once(*(functools.partial(save, name) for name in scenes))
    for name, scene in scenes.items():
        assert scene.committed == [(step, seq) for seq, step in enumerate(saved[name], 1)]
        assert scene.log() == ["CLAIM 1"] + ["COMMIT 1"] * len(saved[name])
        scene.check(*saved[name])
        passed_on = [seen for seen in scene.proxy.seen if seen.action is None]
        assert len(scene.proxy.seen) < 2 * len(passed_on)
        pauses = pauses_after(scene, 503)
        assert max(pauses) < STORMY.longest_pause_seconds + SLACK_SECONDS
        assert max(pauses) - min(pauses) > STORMY.first_pause_seconds / 8  # drawn, not fixed
        if not name.startswith("obstore"):  # which tells nobody of an answer's headers
            assert min(pauses_after(scene, 429)) > 0.99


IMPATIENT = RetryOptions(
    attempts=1000, first_pause_seconds=0.02, longest_pause_seconds=0.2, deadline_seconds=1.5, stall_timeout_seconds=5
)
PERSISTENT = RetryOptions(
    attempts=40, first_pause_seconds=0.02, longest_pause_seconds=0.1, deadline_seconds=60, stall_timeout_seconds=20
)


@on("obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-book")
@pytest.mark.parametrize(
    "trouble",
    ["503 SlowDown", "500 InternalError", "429 TooManyRequests", "502 BadGateway", "reset", "lost"],
)
def test_a_save_whose_first_three_requests_of_each_phase_fail_ends_well(scene, trouble):
    """With the usual number of tries. The phases: opening, the upload, the commit."""
    action = {"reset": Reset(), "lost": DropReply()}.get(trouble) or scene.refusal(int(trouble[:3]), trouble[4:])
    phases = {"get": "run.json", "open_upload": "rank-", "complete": "rank-", "put": "log/"}
    taps = [scene.upon(operation, key, action, times=3) for operation, key in phases.items()]

    def tap(call, act):
        for each, _ in taps:
            each(call, lambda: None)
        return act()

    scene.save(1, scene.writer(tap), megabytes=6)
    assert [rule.hits for _, rules in taps for rule in rules.values()] == [3] * 5
    assert scene.committed == [("step-1", 1)]
    scene.check("step-1")


@on("obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-book")
def test_a_save_whose_first_thirty_requests_are_refused_ends_well_if_it_may_try_so_often(scene):
    with scene.proxy.rule(scene.refusal(503, "SlowDown"), times=30) as rule:
        scene.save(1, scene.writer(moves=transfer(PERSISTENT)), megabytes=6)
    assert rule.hits == 30
    scene.check("step-1")


@on("obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto")
@pytest.mark.parametrize("code", ["InternalError", "SlowDown"])
def test_an_upload_that_is_completed_with_an_error_in_a_good_answer_is_completed_again(scene, code):
    """S3 says 200 first, and then finds that it cannot."""
    error = s3_error(200, code)
    with scene.proxy.rule(error, method="POST", query="uploadId=", times=2) as rule:
        scene.save(1, megabytes=6)
    assert rule.hits == 2
    assert scene.uploads() == []
    scene.check("step-1")
    with scene.proxy.rule(error, method="POST", query="uploadId="), pytest.raises(UnavailableError) as caught:
        scene.save(2, scene.writer(moves=transfer(IMPATIENT)), megabytes=6)
    assert "rank-00000.safetensors" in caught.value.facts["key"]
    scene.check("step-1")


def save_for(place, seconds):
    """Save as one of several ranks until time is over; return how often."""
    PROBED.add(place_of(place.store()))
    writer = sw.CkptStoreWriter(place.url, **place.access, transfer=transfer(STORMY))
    over, world = time.monotonic() + seconds, dist.get_world_size()
    step, enough = 0, [False] * world
    while not any(enough):
        step += 1
        dist.all_gather_object(enough, time.monotonic() > over)
        state = {f"w{dist.get_rank()}": torch.full((1_500_000,), float(step * world + dist.get_rank()))}
        sw.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    return step


def come():
    """Be a rank, and no more."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@on("obstore-seaweedfs", "s3fs-seaweedfs")
def test_in_a_storm_of_refusals_every_save_of_four_ranks_ends_well(gang, scene):
    action = scene.refusal(503, "SlowDown")
    gang.values(4, come)  # the ranks are there before the storm is
    with scene.proxy.rule(action, share=0.3, seconds=STORM_SECONDS) as rule:
        saves = gang.values(4, save_for, scene.through, STORM_SECONDS, seconds=200)
    assert rule.hits > 20
    assert len(set(saves)) == 1
    assert scene.log() == ["CLAIM 1"] + ["COMMIT 1"] * saves[0]
    for checkpoint in scene.open().checkpoints():
        step = int(checkpoint.checkpoint_id.removeprefix("step-"))
        for rank in range(4):
            assert set(checkpoint.read(f"w{rank}").tolist()) == {float(step * 4 + rank)}
    scene.check_owners()
