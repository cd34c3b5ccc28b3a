"""Google's storage takes one write per second of an object: only a hint is ever written twice, and it fails nothing."""

import json
import time

from places import on
from scenes import transfer

from ckptstore.clock import SystemIds
from ckptstore.events import HintFailed
from ckptstore.objectstore.probe import probe
from ckptstore.options import RetryOptions

ONCE = RetryOptions(attempts=1)


def latest(by_the_book, scene):
    """Return what the hint names."""
    return json.loads(by_the_book.gcs.objects[f"{scene.prefix}latest.json"])["checkpoint_id"]


@on("gcsfs-book")
def test_saves_that_follow_at_once_all_commit_and_the_hint_is_written_again_until_it_is_taken(scene, by_the_book):
    by_the_book.gcs.seconds_between_writes = 1
    writer = scene.writer(moves=transfer(RetryOptions()))
    for step in range(1, 4):
        scene.save(step, writer)
    assert scene.committed == [(f"step-{step}", step) for step in range(1, 4)]
    assert set(by_the_book.gcs.too_soon) == {f"{scene.prefix}latest.json"}
    assert not [event for event in scene.told if isinstance(event, HintFailed)]
    assert latest(by_the_book, scene) == "step-3"
    scene.check(*(f"step-{step}" for step in range(1, 4)))


@on("gcsfs-book")
def test_five_saves_in_two_seconds_all_commit_though_the_hint_is_refused(scene, by_the_book):
    """I10: it is told, and whoever looks reads the log."""
    by_the_book.gcs.seconds_between_writes = 60
    writer = scene.writer(moves=transfer(ONCE))
    scene.save(1, writer)
    began = time.monotonic()
    for step in range(2, 7):
        scene.save(step, writer)
    assert time.monotonic() - began < 30  # two, on a machine that nobody else uses
    assert scene.committed == [(f"step-{step}", step) for step in range(1, 7)]
    failed = [event.key for event in scene.told if isinstance(event, HintFailed)]
    assert failed == ["latest.json"] * 5
    assert latest(by_the_book, scene) == "step-1"
    assert scene.open().latest().checkpoint_id == "step-6"
    scene.check(*(f"step-{step}" for step in range(1, 7)))


@on("gcsfs-book")
def test_the_probe_waits_its_turn_and_finds_the_store_fit(scene, by_the_book):
    by_the_book.gcs.seconds_between_writes = 1
    probe(scene.through.store(), ids=SystemIds(), prefix="probe/")
    assert by_the_book.gcs.too_soon
