"""Ranks that differ, do not come, or fail: every rank hears it, typed and named, and nothing is committed."""

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import bits
from torch.distributed.checkpoint.api import CheckpointException

import storage_writers as sw
from ckptstore.errors import (
    CommitUnknownError,
    DisagreementError,
    FencedError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from ckptstore.events import UploadBegan
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.protocol.log import RunLog
from storage_writers import agreement
from storage_writers.ranks import Peers

STATE = 1000


def state():
    """Return a state of which every rank has something to write."""
    return {f"x{index}": torch.arange(STATE) + index for index in range(dist.get_world_size())}


def loaded(url):
    target = {key: torch.zeros_like(value) for key, value in state().items()}
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    return all(bits(target[key]) == bits(value) for key, value in state().items())


def caught(work):
    """Return what `work` raised, and how long that took."""
    began = time.monotonic()
    try:
        work()
    except BaseException as error:  # noqa: BLE001  (CheckpointException is one)
        return error, time.monotonic() - began
    return None, time.monotonic() - began


def objects(path):
    return sorted(p.name for p in path.rglob("*") if p.is_file() and "data" in p.parts)


def save_then_again(url, name, roots=None):
    """Save under this rank's own name (and root), which fails, then under one name; return the failure."""
    rank = dist.get_rank()
    writer = sw.CkptStoreWriter(roots[rank] if roots else url, agree_timeout_seconds=5)
    error, _ = caught(lambda: sw.save(state(), checkpoint_id=name[rank], storage_writer=writer))
    before = Path(url, "data").exists()
    sw.save(state(), checkpoint_id="after", storage_writer=sw.CkptStoreWriter(url))
    return error, before, loaded(url)


def test_different_names_are_refused_by_all_with_each_ranks_value(gang, tmp_path):
    for error, wrote, works_after in gang.values(3, save_then_again, str(tmp_path), ["step-1", "step-2", "step-1"]):
        assert isinstance(error, DisagreementError)
        assert error.facts["values"] == {"0": "step-1", "1": "step-2", "2": "step-1"}
        assert (wrote, works_after) == (False, True)


def test_different_roots_are_refused_by_all(gang, tmp_path):
    roots = [str(tmp_path / "one"), str(tmp_path / "one"), str(tmp_path / "other")]
    for error, _, works_after in gang.values(3, save_then_again, roots[0], ["a"] * 3, roots):
        assert isinstance(error, DisagreementError)
        assert error.facts["differs"] == "the run's root"
        assert error.facts["values"]["2"].endswith("/other")
        assert works_after
    assert not (tmp_path / "other").exists()


def save_with_steps(url):
    writer = sw.CkptStoreWriter(url)
    writer.describe(global_step=dist.get_rank() // 2)
    return caught(lambda: sw.save(state(), storage_writer=writer))[0]


def test_different_steps_are_refused_by_all_also_without_a_name(gang, tmp_path):
    for error in gang.values(3, save_with_steps, str(tmp_path)):
        assert isinstance(error, DisagreementError)
        assert error.facts["values"] == {"0": "step-0", "1": "step-0", "2": "step-1"}


def some_save(url, who):
    """Only the ranks `who` save; then all do."""
    writer = sw.CkptStoreWriter(url, agree_timeout_seconds=1)
    error, seconds = None, 0.0
    if dist.get_rank() in who:
        error, seconds = caught(lambda: sw.save(state(), checkpoint_id="a", storage_writer=writer))
    dist.barrier()
    sw.save(state(), checkpoint_id="b", storage_writer=writer)
    return error, seconds, loaded(url)


@pytest.mark.parametrize(("who", "missing"), [([0], [1, 2]), ([0, 2], [1]), ([1, 2], [0])], ids=str)
def test_ranks_that_never_come_are_named_in_time_and_the_next_save_works(gang, tmp_path, who, missing):
    for rank, (error, seconds, works_after) in enumerate(gang.values(3, some_save, str(tmp_path), who)):
        assert works_after
        if rank in who:
            assert isinstance(error, DisagreementError)
            assert error.facts["missing"] == missing
            assert seconds < 20


class Unplugged(ForwardingStore):
    """A store to which one rank can upload nothing."""

    def __init__(self, inner, *, fails):
        super().__init__(inner)
        self.fails = fails

    def open_upload(self, key, *, size):
        if self.fails:
            raise UnavailableError(f"{key} cannot be stored: no route.", key=key)
        return super().open_upload(key, size=size)


def save_with_a_broken_rank(url, broken, plain):
    store = Unplugged(open_store(url), fails=dist.get_rank() == broken)
    call = dcp.save if plain else sw.save
    error, _ = caught(lambda: call(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store)))
    logs = len(list(open_store(url).list("log/")))
    dist.barrier()
    sw.save(state(), checkpoint_id="b", storage_writer=sw.CkptStoreWriter(url))
    return error, logs, loaded(url)


@pytest.mark.parametrize("plain", [False, True], ids=["sw.save", "dcp.save"])
def test_a_rank_that_cannot_upload_fails_the_save_on_all_and_nothing_is_committed(gang, tmp_path, plain):
    for raised, logs, works_after in gang.values(3, save_with_a_broken_rank, str(tmp_path), 2, plain):
        assert isinstance(raised, CheckpointException) is plain
        error = sw.cause(raised)
        assert isinstance(error, UnavailableError)
        assert error.facts["rank"] == 2
        assert "Rank 2" in str(error)
        assert logs == 1  # the claim
        assert works_after
    assert sum(name.startswith("rank-") for name in objects(tmp_path)) == 2 + 3


class Unreachable(Unplugged):
    """A store of which one rank can read nothing."""

    def get(self, key, *, max_bytes):
        if self.fails:
            raise UnavailableError(f"{key} cannot be read: no route.", key=key)
        return super().get(key, max_bytes=max_bytes)


def save_where_one_cannot_read(url):
    store = Unreachable(open_store(url), fails=dist.get_rank() == 1)
    return caught(lambda: sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(store)))[0]


def test_a_rank_that_cannot_reach_the_store_is_named_before_anything_is_claimed(gang, tmp_path):
    for error in gang.values(3, save_where_one_cannot_read, str(tmp_path)):
        assert isinstance(error, UnavailableError)
        assert error.facts["rank"] == 1
    assert not (tmp_path / "log").exists()


def save_with_a_lambda(url):
    mine = {"hook": lambda: 1} if dist.get_rank() == 2 else {}
    return caught(lambda: sw.save(state() | mine, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url)))[0]


def test_a_value_that_one_rank_cannot_save_is_refused_on_all_before_any_object_exists(gang, tmp_path):
    for error in gang.values(4, save_with_a_lambda, str(tmp_path)):
        assert isinstance(error, UnsupportedError)
        assert error.facts["rank"] == 2
        assert "hook" in str(error)
    assert objects(tmp_path) == []


def load_with_one_other_dtype(url):
    sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    dtype = torch.int32 if dist.get_rank() == 1 else torch.int64
    target = {key: torch.zeros(STATE, dtype=dtype) for key in state()}
    error, _ = caught(lambda: sw.load(target, storage_reader=sw.CkptStoreReader(url)))
    return error, all(not tensor.any() for tensor in target.values())


def test_a_target_that_one_rank_would_cast_leaves_the_targets_of_all_untouched(gang, tmp_path):
    for error, untouched in gang.values(3, load_with_one_other_dtype, str(tmp_path)):
        assert (error.code, error.facts["rank"], untouched) == ("incompatible_state", 1, True)


def load_a_mixture(url):
    for name in ("a", "b"):
        sw.save(state(), checkpoint_id=name, storage_writer=sw.CkptStoreWriter(url))
    seq = [1, 2][dist.get_rank() % 2]
    target = {key: torch.zeros(STATE, dtype=torch.int64) for key in state()}
    error, _ = caught(lambda: sw.load(target, storage_reader=sw.CkptStoreReader(url, seq=seq)))
    return error, all(not tensor.any() for tensor in target.values())


def test_ranks_that_chose_different_checkpoints_load_none(gang, tmp_path):
    """I12."""
    for error, untouched in gang.values(2, load_a_mixture, str(tmp_path)):
        assert isinstance(error, DisagreementError)
        assert untouched


def load_from_where_nothing_is(url, known_to):
    """Load from `url`, and on the ranks that do not know of it from elsewhere."""
    target = {"x": torch.zeros(3)}
    root = url if dist.get_rank() in known_to else f"{url}/nowhere"
    error, _ = caught(lambda: sw.load(target, storage_reader=sw.CkptStoreReader(root)))
    return error, target["x"].any().item()


@pytest.mark.parametrize("begun", [False, True], ids=["no run", "a run without a checkpoint"])
def test_all_ranks_learn_alike_that_nothing_is_committed(gang, tmp_path, begun):
    """So a job may begin anew when it catches NotFoundError, and no rank goes another way."""
    if begun:
        RunLog.create(open_store(str(tmp_path)))
    for error, touched in gang.values(3, load_from_where_nothing_is, str(tmp_path), [0, 1, 2]):
        assert isinstance(error, NotFoundError)
        assert error.facts["rank"] == 0
        assert not touched


def load_where_one_sees_more(url):
    if dist.get_rank() == 0:
        writer = sw.CkptStoreWriter(url, allow_one_rank=True)
        sw.save({"x": torch.ones(3)}, checkpoint_id="a", storage_writer=writer, no_dist=True)
    dist.barrier()
    return load_from_where_nothing_is(url, [0])


def test_one_rank_that_sees_nothing_stops_all_from_loading(gang, tmp_path):
    """I12."""
    for error, touched in gang.values(2, load_where_one_sees_more, str(tmp_path)):
        assert isinstance(error, NotFoundError)
        assert error.facts["rank"] == 1
        assert not touched


def save_without_dist(url, *, allow=False):
    writer = sw.CkptStoreWriter(f"{url}/{dist.get_rank()}" if allow else url, allow_one_rank=allow)
    return caught(lambda: sw.save(state(), checkpoint_id="a", storage_writer=writer, no_dist=True))[0]


def save_alone_on_purpose(url):
    return save_without_dist(url, allow=True)


def test_no_dist_on_every_rank_is_refused_unless_it_is_meant(gang, tmp_path):
    for error in gang.values(2, save_without_dist, str(tmp_path / "refused")):
        assert isinstance(error, InvalidInputError)
    assert objects(tmp_path / "refused") == []
    assert gang.values(2, save_alone_on_purpose, str(tmp_path / "meant")) == [None, None]


def save_to_memory():
    return caught(lambda: sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter("memory://x")))[0]


def test_the_memory_of_one_process_is_refused_for_several(gang):
    for error in gang.values(2, save_to_memory):
        assert isinstance(error, InvalidInputError)
        assert "memory" in str(error)


def die_in_the_upload(url):
    def observe(event):
        if isinstance(event, UploadBegan) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    writer = sw.CkptStoreWriter(url, observer=observe, agree_timeout_seconds=5)
    return caught(lambda: sw.save(state(), checkpoint_id="b", storage_writer=writer))


def save_and_check(url):
    sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    return loaded(url)


def only_loaded(url):
    return loaded(url)


def test_after_a_rank_was_killed_in_a_save_the_checkpoint_before_is_loaded_and_the_next_save_works(gang, tmp_path):
    """I11."""
    assert gang.values(3, save_and_check, str(tmp_path)) == [True] * 3
    outcomes = gang.run(3, die_in_the_upload, str(tmp_path))
    assert outcomes[1].died
    assert outcomes[0].value[0] is not None
    assert gang.values(3, only_loaded, str(tmp_path)) == [True] * 3
    assert gang.values(3, save_and_check, str(tmp_path)) == [True] * 3


def two_sides(store, values, *, late, seconds):
    """Let two threads agree as ranks 0 and 1; return what each got. One of them is late."""
    outcomes = {}

    def side(rank):
        if rank == late:
            time.sleep(0.3)

        def judge(proposals):
            agreement.same(["the value"], [[proposal] for proposal in proposals])
            return proposals[0]

        try:
            outcomes[rank] = agreement.agree(
                Peers(rank, 2, "test", store), lambda: values[rank], judge, seconds=seconds
            )
        except DisagreementError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=side, args=(rank,)) for rank in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


@pytest.mark.parametrize("late", [0, 1])
def test_whoever_comes_late_is_waited_for(late):
    assert two_sides(dist.HashStore(), {0: "x", 1: "x"}, late=late, seconds=5) == {0: "x", 1: "x"}


@pytest.mark.parametrize("root_first", [False, True])
def test_who_waits_for_a_slow_rank_0_is_told_that_it_came(root_first):
    store, ended = dist.HashStore(), threading.Event()
    store.set_timeout(timedelta(seconds=0.3))

    def slow_root():
        with contextlib.suppress(DisagreementError):  # the other one has left
            agreement.agree(Peers(0, 2, "test", store), lambda: ended.wait(20), lambda _: None, seconds=0.1)

    root = threading.Thread(target=slow_root)
    root.start()
    with pytest.raises(DisagreementError, match=r"^Rank 0 of 2 came, and did not answer within 0\.[34] s") as raised:
        agreement.agree(Peers(1, 2, "test", store), lambda: 1, lambda _: None, seconds=0.1, root_first=root_first)
    assert raised.value.facts["missing"] == [0]
    ended.set()
    root.join(20)


def test_a_proposal_of_who_gave_up_does_not_count_for_the_next_round():
    store = dist.HashStore()
    alone = two_sides(store, {1: "old"}, late=None, seconds=0.2)
    assert alone[1].facts["missing"] == [0]
    assert two_sides(store, {0: "new", 1: "new"}, late=1, seconds=5) == {0: "new", 1: "new"}


def test_nothing_is_left_in_the_store_after_an_agreement():
    store = dist.HashStore()
    two_sides(store, {0: "x", 1: "x"}, late=None, seconds=5)
    assert store.num_keys() == 0


def failures(**errors):
    return CheckpointException("write", {int(rank[1:]): (error, None) for rank, error in errors.items()})


def test_the_cause_is_the_gravest_error_of_the_lowest_rank():
    disagree, invalid, damage = DisagreementError("d"), InvalidInputError("i"), IntegrityError("x")
    unknown, fenced = CommitUnknownError("u"), FencedError("f")
    everything = {"r0": disagree, "r1": invalid, "r2": damage, "r3": unknown, "r4": fenced, "r5": ValueError("v")}
    for worst in (fenced, unknown, damage, invalid, disagree):
        assert sw.cause(failures(**everything)) is worst
        everything = {rank: error for rank, error in everything.items() if error is not worst}
    assert sw.cause(failures(**everything)) is None
    assert sw.cause(ValueError("v")) is None
    assert sw.cause(fenced) is fenced
    first, second = FencedError("first"), FencedError("second")
    found = sw.cause(failures(r7=first, r3=second))
    assert (found is second, found.facts["rank"]) == (True, 3)
