"""A server that is killed and started again in the middle of an upload: the save ends well or fails typed."""

import functools
import time

import pytest
from places import place_at
from scenes import at_once, transfer

from ckptstore.errors import CkptStoreError, UnavailableError
from ckptstore.options import RetryOptions

PATIENT = RetryOptions(
    attempts=40, first_pause_seconds=0.1, longest_pause_seconds=1, deadline_seconds=60, stall_timeout_seconds=20
)
IMPATIENT = RetryOptions(
    attempts=2, first_pause_seconds=0.02, longest_pause_seconds=0.1, deadline_seconds=1, stall_timeout_seconds=20
)


def save_while_it_restarts(scenes, server, retry):
    """Save on each engine at once, kill the server when each has sent a part; return how each save ended."""
    ends = {}

    def save(scene):
        try:
            scene.save(1, scene.writer(moves=transfer(retry, parts_in_flight=1)), megabytes=24)
        except CkptStoreError as error:
            ends[scene.place.engine] = error
        else:
            ends[scene.place.engine] = None

    def restart():
        deadline = time.monotonic() + 60
        while not all(parts_that_arrived(scene) for scene in scenes):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.restart()

    for scene in scenes:
        scene.proxy.bytes_per_second = 8_000_000
    at_once(restart, *(functools.partial(save, scene) for scene in scenes))
    for scene in scenes:
        scene.proxy.bytes_per_second = None
    return ends


def parts_that_arrived(scene):
    return [seen for seen in scene.asked(query="partNumber|upload_id") if seen.status in (200, 308)]


def the_next_saves_work(scenes, ends):
    for scene in scenes:
        went_well = ends[scene.place.engine] is None
        assert scene.committed == [("step-1", 1)] * went_well
        scene.check(*["step-1"] * went_well)
        scene.save(2, megabytes=6)
        scene.check(*["step-1"] * went_well, "step-2")


@pytest.fixture
def on_seaweedfs(request, scene_at):
    return [scene_at(place_at(name, request)) for name in ("obstore-seaweedfs", "s3fs-seaweedfs")]


@pytest.mark.servers
def test_an_upload_outlives_a_restart_of_its_server_if_it_may_wait_so_long(seaweedfs, on_seaweedfs):
    ends = save_while_it_restarts(on_seaweedfs, seaweedfs, PATIENT)
    assert ends == {"obstore": None, "s3fs": None}
    the_next_saves_work(on_seaweedfs, ends)


@pytest.mark.servers
def test_an_upload_that_may_not_wait_for_a_restart_fails_typed_and_the_next_save_works(seaweedfs, on_seaweedfs):
    ends = save_while_it_restarts(on_seaweedfs, seaweedfs, IMPATIENT)
    assert {type(error) for error in ends.values()} == {UnavailableError}
    the_next_saves_work(on_seaweedfs, ends)


@pytest.mark.servers
def test_an_upload_that_its_server_forgot_in_a_restart_fails_typed_and_the_next_save_works(request, fake_gcs, scene_at):
    scenes = [scene_at(place_at("gcsfs-fakegcs", request))]
    ends = save_while_it_restarts(scenes, fake_gcs, PATIENT)
    assert isinstance(ends["gcsfs"], UnavailableError)
    the_next_saves_work(scenes, ends)
