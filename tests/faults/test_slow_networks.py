"""Slow networks, and networks on which nothing moves: a save ends well, or says in time what it waited for."""

import functools
import time

import pytest
from places import place_at
from scenes import at_once, transfer

from ckptstore.errors import StalledError
from ckptstore.options import RetryOptions
from localstack.faults import Stall

ENGINES = ["obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-book"]
SLACK_SECONDS = 20  # others use this machine, too
PATIENT = RetryOptions(first_pause_seconds=0.1, deadline_seconds=60)
IMPATIENT = RetryOptions(
    attempts=1, first_pause_seconds=0.1, longest_pause_seconds=0.2, deadline_seconds=20, stall_timeout_seconds=4
)
ONE_BY_ONE = transfer(IMPATIENT, parts_in_flight=1, fetches_in_flight=1)
LONGEST_SECONDS = 4 + 8 + SLACK_SECONDS
"""Of one try of a part of 5 MiB: four seconds for an answer, and 5 for its bytes, which obstore rounds up to 8."""


@pytest.fixture
def scenes(request, scene_at):
    """A run on each engine, to be used at the same time."""
    return {name: scene_at(place_at(name, request)) for name in ENGINES}


def on_all(scenes, act):
    at_once(*(functools.partial(act, scene) for scene in scenes.values()))


@pytest.mark.servers
def test_at_one_megabyte_per_second_a_save_ends_well(scenes):
    """With the usual time-outs."""

    def save(scene):
        scene.proxy.bytes_per_second = 1_000_000
        began = time.monotonic()
        scene.save(1, scene.writer(moves=transfer(PATIENT)), megabytes=12)
        assert time.monotonic() - began > 11
        assert len(scene.asked("PUT", "rank-|/upload/", "partNumber|upload_id")) <= 3

    on_all(scenes, save)
    for scene in scenes.values():
        assert scene.committed == [("step-1", 1)]
        scene.check("step-1")


def ends_as_stalled(scene, act):
    began = time.monotonic()
    with pytest.raises(StalledError) as caught:
        act()
    assert time.monotonic() - began < LONGEST_SECONDS
    assert "rank-00000.safetensors" in caught.value.facts["key"]
    return caught.value


@pytest.mark.servers
def test_a_network_that_moves_too_little_ends_a_save_in_time(scenes):
    def save(scene):
        def slow_from_the_shard_on(call, act):
            if "rank-" in call.key:
                scene.proxy.bytes_per_second = 50_000
            return act()

        writer = scene.writer(slow_from_the_shard_on, moves=ONE_BY_ONE)
        ends_as_stalled(scene, lambda: scene.save(1, writer, megabytes=12))
        scene.proxy.bytes_per_second = None

    on_all(scenes, save)
    for scene in scenes.values():
        scene.check()
        scene.save(2)
        scene.check("step-2")


@pytest.mark.servers
def test_an_upload_of_which_nothing_moves_any_longer_ends_as_stalled(scenes):
    def save(scene):
        where = {"path": "rank-", "query": "partNumber=2"}
        if scene.place.url.startswith("gs:"):
            where = {"query": "upload_id", "after": 1}
        with scene.proxy.rule(Stall(), **where):
            ends_as_stalled(scene, lambda: scene.save(1, scene.writer(moves=ONE_BY_ONE), megabytes=12))

    on_all(scenes, save)
    for scene in scenes.values():
        scene.check()
        scene.save(2)
        scene.check("step-2")


@pytest.mark.servers
def test_a_read_of_which_nothing_moves_any_longer_ends_as_stalled(scenes):
    def read(scene):
        scene.save(1, megabytes=6)
        checkpoint = scene.open(moves=ONE_BY_ONE).get("step-1")
        with scene.proxy.rule(Stall(), method="GET", path="rank-"):
            ends_as_stalled(scene, lambda: checkpoint.read("large"))

    on_all(scenes, read)
