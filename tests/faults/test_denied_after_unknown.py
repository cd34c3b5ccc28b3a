"""After a request whose fate is unknown, a refusal proves nothing: nothing is deleted, and the next append decides."""

import contextlib
import time

import pytest
from places import on
from scenes import QUICK, transfer

from ckptstore.errors import CommitUnknownError, OutcomeUnknownError
from ckptstore.options import LogOptions, RetryOptions
from localstack.faults import Delay, DropReply, Reset, Stall

DEADLINE_SECONDS = 0.8
SLACK_SECONDS = 8  # others use this machine, too
IMPATIENT = RetryOptions(
    attempts=4, first_pause_seconds=0.02, longest_pause_seconds=0.1, deadline_seconds=3, stall_timeout_seconds=1
)
CLAIM, COMMIT = "log/000000000000.json", "log/000000000001.json"
ARRIVED = {"dropped": DropReply(), "timed out": Delay(3, before=False)}
NEVER_ARRIVED = {"reset": Reset(), "stalled": Stall()}


def save_and_be_denied(scene, key, action):
    """Save; the create of `key` meets `action`, and all that is asked after it is denied. Return what was raised."""
    with contextlib.ExitStack() as rules:

        def tap(call, act):
            if (call.operation, call.key) != ("put", key) or scene.denied_from is not None:
                return act()
            rules.enter_context(scene.proxy.rule(action, times=1))
            try:
                return act()
            finally:
                scene.held, scene.denied_from = scene.objects(), len(scene.proxy.seen)
                rules.enter_context(scene.proxy.rule(scene.refusal(403, "AccessDenied")))

        log = LogOptions(deadline_seconds=DEADLINE_SECONDS)
        scene.trainer, scene.denied_from = scene.writer(tap, moves=transfer(IMPATIENT), log=log), None
        began = time.monotonic()
        with pytest.raises(OutcomeUnknownError) as caught:
            scene.save(1, scene.trainer)
        assert time.monotonic() - began < DEADLINE_SECONDS + SLACK_SECONDS
    return caught.value


def nothing_was_deleted(scene):
    assert set(scene.held) <= set(scene.objects())
    assert scene.asked("DELETE") == []
    assert scene.uploads() == []
    return len(scene.proxy.seen) > scene.denied_from


@on("obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-fakegcs")
@pytest.mark.parametrize("how", ARRIVED | NEVER_ARRIVED)
def test_a_commit_that_is_denied_after_it_was_lost_is_unknown_and_the_next_save_finds_out(scene, how):
    """I5, I7."""
    error = save_and_be_denied(scene, COMMIT, (ARRIVED | NEVER_ARRIVED)[how])
    assert type(error) is CommitUnknownError
    assert error.facts["key"] == COMMIT
    assert "Delete nothing" in error.hint
    assert "in time" not in error.message  # it did answer, with a refusal
    assert scene.committed == []
    assert nothing_was_deleted(scene)
    stands = ["step-1"] if how in ARRIVED else []
    assert [each.checkpoint_id for each in scene.open().checkpoints()] == stands
    scene.check(*stands)
    scene.save(2, scene.trainer)
    assert scene.log() == ["CLAIM 1"] + ["COMMIT 1"] * (len(stands) + 1)
    assert scene.committed == [("step-2", 1 + len(stands))]
    assert [each.state for each in scene.open().uncommitted()] == ["dead"] * (how in NEVER_ARRIVED)
    scene.check(*stands, "step-2")


@on("obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-fakegcs")
@pytest.mark.parametrize("how", ["dropped", "stalled"])
def test_a_claim_that_is_denied_after_it_was_lost_is_unknown_and_nobody_fences_himself(scene, how):
    """I5, I15."""
    error = save_and_be_denied(scene, CLAIM, (ARRIVED | NEVER_ARRIVED)[how])
    assert type(error) is CommitUnknownError
    assert error.facts["key"] == CLAIM
    assert nothing_was_deleted(scene)
    assert scene.open().checkpoints() == []
    scene.save(2, scene.trainer)
    assert scene.log() == ["CLAIM 1", "COMMIT 1"]
    scene.check("step-2")


@on("obstore-seaweedfs", "s3fs-seaweedfs", "gcsfs-fakegcs")
@pytest.mark.parametrize("how", ["timed out", "reset"])
def test_a_run_whose_beginning_is_denied_after_it_was_lost_is_begun_by_the_next_save(scene, how):
    error = save_and_be_denied(scene, "run.json", (ARRIVED | NEVER_ARRIVED)[how])
    assert error.facts["key"] == "run.json"
    assert nothing_was_deleted(scene)
    assert (scene.open().run is not None) == (how in ARRIVED)
    scene.save(2, scene.trainer)
    scene.save(3, scene.writer(moves=transfer(QUICK)))
    assert scene.log() == ["CLAIM 1", "COMMIT 1", "COMMIT 1"]
    scene.check("step-2", "step-3")
