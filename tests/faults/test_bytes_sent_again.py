"""Bytes that are sent again are the right ones, whatever broke off where."""

import functools
import random

import pytest
from places import on, place_at
from scenes import at_once, transfer

from ckptstore.options import RetryOptions
from ckptstore.units import MIB
from localstack.faults import DropReply, Reset, ResetMidBody

SAVES = 50
HARDENED = RetryOptions(
    attempts=30, first_pause_seconds=0.01, longest_pause_seconds=0.1, deadline_seconds=60, stall_timeout_seconds=20
)
EVERY = 10
"""So many saves are small, then one is sent in parts."""


def save_through_breaks(scene):
    """Save random bytes while one request in six breaks: after its body, in it, or before it."""
    writer = scene.writer(moves=transfer(HARDENED, parts_in_flight=2))
    broken = [
        scene.rules.enter_context(scene.proxy.rule(action, share=0.05))
        for action in (DropReply(), ResetMidBody(2 * MIB), ResetMidBody(100), Reset())
    ]
    in_parts = scene.place.server.name != "fake-gcs"  # which takes the question how much it holds for the end
    for step in range(1, SAVES + 1):
        scene.save(step, writer, megabytes=11 if in_parts and step % EVERY == 0 else 0)
    scene.rules.close()
    assert min(rule.hits for rule in broken) > SAVES / 5


@pytest.mark.servers
@pytest.mark.timeout(200)
def test_of_fifty_saves_through_a_network_that_breaks_all_bytes_are_right(request, scene_at):
    names = ["obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-book", "gcsfs-fakegcs"]
    scenes = [scene_at(place_at(name, request)) for name in names]
    at_once(*(functools.partial(save_through_breaks, scene) for scene in scenes))
    for scene in scenes:
        assert scene.log() == ["CLAIM 1"] + ["COMMIT 1"] * SAVES
        scene.check(*(f"step-{step}" for step in range(1, SAVES + 1)))


@on("gcsfs-book")
def test_of_saves_whose_chunks_are_taken_in_part_all_bytes_are_right(scene, by_the_book):
    """Google's servers may take less of a chunk than was sent, and say so, or not."""
    drawn, writer = random.Random(1), scene.writer(moves=transfer(HARDENED))  # noqa: S311  (to be repeated)
    for step in range(1, 8):
        by_the_book.gcs.faults = drawn.choices([None, "short", "partly", "lost", "503", "none", "late"], k=20)
        scene.save(step, writer, megabytes=11)
        assert len(by_the_book.gcs.faults) <= 15  # of the upload 4 requests at least, and one for each record
    scene.check(*(f"step-{step}" for step in range(1, 8)))
