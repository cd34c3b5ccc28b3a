"""A server that refuses for ever ends a save in time: all ranks hear of it, it is named, and nothing is committed."""

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from places import on
from scenes import transfer

import storage_writers as sw
from ckptstore.errors import CkptStoreError, CommitUnknownError, UnavailableError
from ckptstore.options import LogOptions, RetryOptions
from ckptstore.protocol.capable import PROBED, place_of

RANKS = 4
DEADLINE_SECONDS = 0.8
SLACK_SECONDS = 10  # others use this machine, too
IMPATIENT = RetryOptions(
    attempts=1000,
    first_pause_seconds=0.02,
    longest_pause_seconds=0.2,
    deadline_seconds=DEADLINE_SECONDS,
    stall_timeout_seconds=5,
)
LOG = LogOptions(deadline_seconds=DEADLINE_SECONDS)
COMMIT = "log/000000000001.json"
NEVER = {
    "everything": ({}, UnavailableError, "run.json"),
    "the shard of rank 2": ({"path": "/rank-00002"}, UnavailableError, "/rank-00002.safetensors"),
    "the commit": ({"method": "PUT", "path": COMMIT}, UnavailableError, COMMIT),
    "the commit, and whether it is there": ({"path": COMMIT}, CommitUnknownError, COMMIT),
}


def how_it_ends(place):
    """Save as one of several ranks; return what was raised, of what, by whom, and after how long."""
    PROBED.add(place_of(place.store()))
    writer = sw.CkptStoreWriter(place.url, **place.access, transfer=transfer(IMPATIENT), log=LOG)
    state = {f"w{dist.get_rank()}": torch.full((1_500_000,), float(dist.get_rank()))}
    began = time.monotonic()
    try:
        sw.save(state, checkpoint_id="step-1", storage_writer=writer)
    except CkptStoreError as error:
        return type(error), error.facts["key"], error.facts["rank"], time.monotonic() - began
    return None


@on("obstore-seaweedfs", "s3fs-seaweedfs")
@pytest.mark.parametrize("what", NEVER)
def test_all_ranks_hear_in_time_what_was_refused_for_ever(gang, scene, what):
    where, kind, key = NEVER[what]
    with scene.proxy.rule(scene.refusal(503, "SlowDown"), **where) as rule:
        ends = gang.values(RANKS, how_it_ends, scene.through)
    refused = Counter((seen.method, seen.path, seen.query) for seen in scene.proxy.seen if seen.status == 503)
    assert sum(refused.values()) == rule.hits
    assert max(refused.values()) > 1  # how often more, in the time, is a matter of who else uses this machine
    for heard, of, rank, seconds in ends:
        assert (heard, rank) == (kind, 2 if "rank 2" in what else 0)
        assert of.endswith(key)
        assert seconds < DEADLINE_SECONDS + SLACK_SECONDS
    scene.check()
    assert gang.values(RANKS, how_it_ends, scene.through) == [None] * RANKS
    assert scene.log() == ["CLAIM 1", "COMMIT 1"]
    assert [each.checkpoint_id for each in scene.open().checkpoints()] == ["step-1"]
    scene.check_owners()
