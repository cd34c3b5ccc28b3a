"""A rank of a real save is killed with SIGKILL: what is left, what a reader gets, and that the next job just goes on.

The protocol's table of what a crash leaves, row by row, in real processes.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from jobs import SMALL, attempts, history, job, loaded, objects, read_afresh, state, unfinished
from places import at, on
from torch.distributed.checkpoint import DefaultSavePlanner

import storage_writers as sw
from ckptstore.errors import CommitUnknownError, DisagreementError
from ckptstore.events import ShardStored
from ckptstore.format.layout import LATEST_KEY, RUN_KEY, slot_key
from ckptstore.format.records import decode_latest
from ckptstore.options import TransferOptions
from ckptstore.testing.tapped import TappedStore
from ckptstore.units import MIB
from storage_writers import survivors

LIMIT_SECONDS = 45
"""How long the survivors may take. The group's own limit is 60 s: it must not be what ends them."""

LARGE = 6 * 900_000
"""Rows, of which each of three ranks has 13.7 MiB: three parts."""


@dataclass(frozen=True)
class Left:
    """What a kill leaves of the attempt.

    Args:
        shard: The killed rank's shard is there. (Those of the others always are.)
        unfinished: An upload of the killed rank is under way for ever.
        parts: The manifest parts are there.
        committed: The commit stands in the log, so a reader gets the new checkpoint.
    """

    shard: bool = True
    unfinished: bool = False
    parts: bool = False
    committed: bool = False


UNTOLD = ("fsspec", "gcsfs")
"""Engines that cannot say which uploads are under way."""

LEFT = {
    "before the first part": Left(shard=False),
    "within a part": Left(shard=False, unfinished=True),
    "before completing": Left(shard=False, unfinished=True),
    "after completing": Left(),
    "before the receipt": Left(),
    "after the receipt": Left(),
    "before the parts": Left(),
    "before the commit": Left(parts=True),
    "after the commit": Left(parts=True, committed=True),
    "before the hint": Left(parts=True, committed=True),
}
ON_ALL_RANKS = list(LEFT)[:6]
ON_THE_COORDINATOR = list(LEFT)[6:]
LARGE_AT = ("within a part", "before completing", "after completing")

NAMES = {"open_upload": "the first part", "complete": "completing"}
PUTS = {RUN_KEY: "the run", "data": "the parts", "log": "the commit", LATEST_KEY: "the hint"}


def moments_of(call, writes):
    """Return what the moments before and after a call are called."""
    if call.operation == "write":
        writes.append(call.key)
        return None, "within a part" if len(writes) == 3 else None  # two parts are on their way, and the last
    if call.key.endswith("/race"):
        return None, "within the probe"
    if call.key == slot_key(0):
        return None, "after the claim"
    name = PUTS.get(call.key.split("/")[0]) if call.operation == "put" else NAMES.get(call.operation)
    return f"before {name}", f"after {name}"


class Watched(sw.CkptStoreWriter):
    """A writer that says `reach(moment)` at every moment of its save."""

    def __init__(self, place, reach):
        transfer, writes = TransferOptions(part_bytes=5 * MIB), []

        def tap(call, act):
            before, after = moments_of(call, writes)
            reach(before)
            result = act()
            reach(after)
            return result

        def observe(event):
            if isinstance(event, ShardStored):
                reach("before the receipt")

        store = TappedStore(place.store(transfer=transfer), tap)
        super().__init__(store, transfer=transfer, observer=observe, **place.promise)
        self._reach = reach

    def write_data(self, plan, planner):
        results = super().write_data(plan, planner)
        self._reach("after the receipt")
        return results


def reacher(moment, reached_by, victim):
    """Return what kills `victim` when the rank `reached_by` has come to `moment`."""
    survivors.LOOK_SECONDS = 2  # for who never comes
    rank, pids = dist.get_rank(), [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def reach(here):
        if (here, rank) == (moment, reached_by):
            os.kill(pids[victim], signal.SIGKILL)

    return reach


def save_and_be_killed(place, rows, *death):
    """Save twice; the second save ends in a death."""
    place.probed()
    reach = reacher(*death)
    sw.save(state(1), checkpoint_id="step-1", storage_writer=place.writer())
    sw.save(state(2, rows), checkpoint_id="step-2", storage_writer=Watched(place, reach))


def save_in_the_background_and_be_killed(place, rows, *death):
    reach = reacher(*death)
    sw.save(state(1), checkpoint_id="step-1", storage_writer=place.writer())
    sw.async_save(state(2, rows), checkpoint_id="step-2", storage_writer=Watched(place, reach)).result(60)


def load_and_be_killed(place, rows, *death):
    reach = reacher(*death)
    sw.save(state(1), checkpoint_id="step-1", storage_writer=place.writer())

    def tap(call, act):
        if call.key.startswith("data/"):
            reach(call.operation)
        return act()

    reader = sw.CkptStoreReader(TappedStore(place.store(), tap), agree_timeout_seconds=1)
    sw.load(state(0, rows), storage_reader=reader)


def be_killed_before_the_first_byte(place, rows, *death):
    """Save; a rank dies while it looks at its values, for which the others wait."""
    reach = reacher(*death)

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item):
            reach("at its values")
            return super().resolve_data(write_item)

    writer = place.writer(agree_timeout_seconds=1)
    sw.save(state(1, rows), checkpoint_id="step-1", storage_writer=writer, planner=Planner())


def resume_and_save(place, rows):
    """Load the newest on all ranks, save the next, and load that; return whose states they were."""
    place.probed()
    before = loaded(place, rows)
    sw.save(state(3), checkpoint_id="step-3", storage_writer=place.writer())
    return before, loaded(place)


def be_killed(place, work, *death, rows=SMALL, group_seconds=60):
    """Run `work` on three ranks one of which is killed, and return the errors of the others, by rank."""
    _, _, victim = death
    with job(group_seconds=group_seconds) as killed:
        outcomes = killed.run(3, work, place, rows, *death, seconds=LIMIT_SECONDS)
    assert [outcome.died for outcome in outcomes] == [rank == victim for rank in range(3)]
    return {rank: outcome.error for rank, outcome in enumerate(outcomes) if not outcome.died}


def check_left(place, victim, left):
    """Look at the store from outside, and in the log."""
    shards = [f"rank-{rank:05d}.safetensors" for rank in range(3) if left.shard or rank != victim]
    assert objects(place, "step-2") == ["part-00000.json.gz"] * left.parts + shards
    assert unfinished(place) == (None if place.engine in UNTOLD else [victim] * left.unfinished)
    assert history(place) == ["CLAIM 1", "COMMIT 1"] + ["COMMIT 1"] * left.committed
    assert decode_latest(place.store().get(LATEST_KEY, max_bytes=MIB)).seq == 1
    assert attempts(place, "step-2") == ["in progress"] * (not left.committed)


def check_next_job_goes_on(place, left, *, ranks, rows):
    """Nobody cleans up: a new job resumes from what is there, saves, and its checkpoint is the latest."""
    before = [("step-2", 2, 2), ("step-1", 1, 1)][not left.committed :]
    assert read_afresh(place) == before
    with job() as resumed:
        assert (
            resumed.values(ranks, resume_and_save, place, rows if left.committed else SMALL)
            == [(before[0][2], 3)] * ranks
        )
    end = 3 + left.committed
    assert read_afresh(place) == [("step-3", end, 3), *before]
    assert history(place)[-2:] == ["CLAIM 2", "COMMIT 2"]
    assert attempts(place, "step-2") == ["dead"] * (not left.committed)


def check_killed(place, moment, victim):
    """Save, lose a rank, look at what is left, and go on."""
    left, rows = LEFT[moment], LARGE if moment in LARGE_AT else SMALL
    left_alive = be_killed(place, save_and_be_killed, moment, victim, victim, rows=rows)
    for error in left_alive.values():  # only rank 0 knows whether it was committed
        assert type(error) is (CommitUnknownError if victim == 0 else DisagreementError)
        assert error.facts["missing"] == [victim]
    check_left(place, victim, left)
    check_next_job_goes_on(place, left, ranks=2 if moment == "before the commit" else 3, rows=rows)


ON_S3 = [(moment, victim) for moment in ON_ALL_RANKS for victim in (0, 2)]
ON_S3 += [(moment, 0) for moment in ON_THE_COORDINATOR]
ON_FILES = [("within a part", 0), ("within a part", 2), ("after completing", 0), ("after completing", 2)]
ON_FILES += [(moment, 0) for moment in ("before the parts", "before the commit", "after the commit")]
EACH_ONCE = [(moment, 2) for moment in ON_ALL_RANKS] + [(moment, 0) for moment in ON_THE_COORDINATOR]
SOUND = {"obstore-seaweedfs": ON_S3, "files": ON_FILES, "s3fs-seaweedfs": EACH_ONCE, "gcsfs-fakegcs": EACH_ONCE}
REFUSED = {  # each server at each moment, by one engine or the other
    "fsspec-files": EACH_ONCE,
    "obstore-rclone": EACH_ONCE[::2],
    "s3fs-rclone": EACH_ONCE[1::2],
    "obstore-juicefs": EACH_ONCE[1::2],
    "s3fs-juicefs": EACH_ONCE[::2],
}


def rare(name, case, cases):
    """Mark what only the slow set runs: all but two moments a place, the commit's and another one at each."""
    kept = {("before the commit", 0), ("after the commit", 0), cases[name][list(cases).index(name) % len(cases[name])]}
    return [] if name == "files" or case in kept else [pytest.mark.slow]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("place", "moment", "victim"),
    [at(name, *case, marks=rare(name, case, SOUND)) for name in SOUND for case in SOUND[name]],
    indirect=["place"],
)
def test_a_save_with_a_killed_rank_is_whole_or_absent_and_the_next_job_goes_on(place, moment, victim):
    """I4, I5, I7, I10, I11."""
    check_killed(place, moment, victim)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("place", "moment", "victim"),
    [at(name, *case, marks=rare(name, case, REFUSED)) for name in REFUSED for case in REFUSED[name]],
    indirect=["place"],
)
def test_so_it_is_where_a_single_writer_is_promised_because_the_store_does_not_create_once(place, moment, victim):
    """I4, I5, I7, I10, I11."""
    check_killed(place.promising(), moment, victim)


def be_killed_in_the_first_save(place, rows, *death):
    moment, *_ = death
    if moment == "after the claim":  # the races of a probe take a server longer than the group's limit
        place.probed()
    sw.save(state(1, rows), checkpoint_id="step-1", storage_writer=Watched(place, reacher(*death)))


def save_first(place):
    sw.save(state(3), checkpoint_id="step-3", storage_writer=place.writer())
    return loaded(place)


FIRST = {"within the probe": [], "before the run": [], "after the run": [], "after the claim": ["CLAIM 1"]}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("place", "moment"),
    [*(at("files", moment) for moment in FIRST), at("obstore-seaweedfs", "after the claim")],
    indirect=["place"],
)
def test_a_first_save_whose_rank_0_is_killed_leaves_no_checkpoint_and_the_next_job_begins(place, moment):
    """I5, I11."""
    left_alive = be_killed(place, be_killed_in_the_first_save, moment, 0, 0, group_seconds=8)
    for error in left_alive.values():
        assert isinstance(error, DisagreementError | CommitUnknownError)
        assert error.facts["missing"] == [0]
    assert history(place) == FIRST[moment]
    assert (place.opened().run is None) == (moment in ("within the probe", "before the run"))
    assert read_afresh(place) == []
    with job() as begun:
        assert begun.values(3, save_first, place) == [3] * 3
    assert read_afresh(place) == [("step-3", len(FIRST[moment]) + 1, 3)]


@on("files", "obstore-seaweedfs")
def test_a_rank_that_is_killed_when_its_receipt_is_there_does_not_stop_the_commit(place):
    """I5: what is committed is never reported as failed."""
    left_alive = be_killed(place, save_and_be_killed, "before the parts", 0, 2)
    for error in left_alive.values():  # who heard of the commit before the loss has no error
        assert error is None or (error.facts["committed"] == 2 and 2 in error.facts["missing"])
    assert decode_latest(place.store().get(LATEST_KEY, max_bytes=MIB)).seq == 2
    assert read_afresh(place) == [("step-2", 2, 2), ("step-1", 1, 1)]


@on("files")
def test_a_rank_that_is_killed_in_a_background_save_is_told_of_by_the_future(place):
    left_alive = be_killed(place, save_in_the_background_and_be_killed, "after completing", 2, 2)
    assert [type(error) for error in left_alive.values()] == [DisagreementError] * 2
    assert [error.facts["missing"] for error in left_alive.values()] == [[2], [2]]
    assert read_afresh(place) == [("step-1", 1, 1)]


@on("files")
@pytest.mark.parametrize(
    ("work", "moment"), [(load_and_be_killed, "get_range"), (be_killed_before_the_first_byte, "at its values")]
)
def test_a_rank_that_is_killed_while_the_others_wait_for_its_word_is_named_within_the_groups_time_out(
    place, work, moment
):
    left_alive = be_killed(place, work, moment, 2, 2, group_seconds=4)
    for error in left_alive.values():
        assert type(error) is DisagreementError
        assert error.facts["missing"] == [2]


class Unfit:
    """A part of a model that takes nothing back."""

    def state_dict(self):
        return {"x": torch.ones(2)}

    def load_state_dict(self, state):
        raise RuntimeError(f"size mismatch for {sorted(state)}")


def save_and_load_what_does_not_fit(place):
    sw.save({"part": Unfit()}, checkpoint_id="step-1", storage_writer=place.writer())
    sw.load({"part": Unfit()}, storage_reader=place.reader())


@on("files")
def test_a_model_that_raises_is_not_taken_for_a_lost_rank(place):
    with job() as trainer:
        for outcome in trainer.run(2, save_and_load_what_does_not_fit, place):
            assert (type(outcome.error), str(outcome.error)) == (RuntimeError, "size mismatch for ['x']")
