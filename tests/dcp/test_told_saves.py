"""What an observer hears of saves and loads: each begins, goes through its phases and ends once, well or not."""

import pickle
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import FencedError, IntegrityError, NotFoundError, UnavailableError
from ckptstore.events import (
    Committed,
    DamageFound,
    Loaded,
    PhaseEnded,
    RecoveryPoints,
    RestoreFailed,
    SaveBegan,
    SaveEnded,
    SaveSkipped,
    together,
)
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.tapped import TappedStore

PHASES = ["plan", "upload", "gather", "verify", "commit"]


def state():
    return {"w": torch.arange(6.0)}


class Heard(list):
    """Events, and what they say in short."""

    def __call__(self, event):
        self.append(event)

    def of(self, *kinds):
        return [event for event in self if isinstance(event, kinds)]

    @property
    def saves(self):
        """Return by save: in the background or not, its phases, how it ended."""
        found = {}
        for event in self.of(SaveBegan, PhaseEnded, SaveEnded):
            match event:
                case SaveBegan():
                    found[event.save] = [event.background]
                case PhaseEnded():
                    found[event.save].append(event.phase)
                case SaveEnded():
                    found[event.save].append(event.error)
        return list(found.values())


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def writer(url, heard):
    with sw.CkptStoreWriter(url, observer=heard) as writer:
        yield writer


def test_a_save_is_told_from_its_begin_through_its_phases_to_its_end(writer, heard):
    sw.save(state(), checkpoint_id="a", storage_writer=writer)
    assert heard.saves == [[False, *PHASES, None]]
    phases, (end,) = heard.of(PhaseEnded), heard.of(SaveEnded)
    assert {event.checkpoint_id for event in (*phases, end)} == {"a"}
    assert 0 < sum(event.seconds for event in phases) <= end.seconds


def test_a_background_save_tells_how_long_the_training_waited_and_ends_once(writer, heard):
    with torch.no_grad():
        sw.async_save(state(), checkpoint_id="a", storage_writer=writer).result()
    writer.wait()
    ((background, *told, error),) = heard.saves
    assert (background, sorted(told), error) == (True, sorted(["stage", *PHASES]), None)
    (stage,) = [event for event in heard.of(PhaseEnded) if event.phase == "stage"]
    assert 0 < stage.seconds <= heard.of(SaveEnded)[0].seconds


def test_dcps_own_calls_are_told_alike(writer, heard):
    dcp.save(state(), checkpoint_id="a", storage_writer=writer)
    writer.describe(global_step=2)
    dcp.async_save(state(), checkpoint_id="b", storage_writer=writer, process_group=writer.process_group).result()
    writer.wait()
    assert [sorted(map(str, each)) for each in heard.saves] == [
        sorted(["False", *PHASES, "None"]),
        sorted(["True", "stage", *PHASES, "None"]),
    ]


class Refusing(FaultyStore):
    """Refuses what is named, as long as it is."""

    def __init__(self, inner):
        super().__init__(inner, lambda call: Fault.DENIED if self.named and self.named in call.key else None)
        self.named = ""


@pytest.mark.parametrize("own", ["sw", "dcp"])
def test_a_save_that_fails_is_told_with_its_code(url, heard, own):
    store = Refusing(open_store(url))
    writer = sw.CkptStoreWriter(store, observer=heard)
    call, expected = (sw.save, Exception) if own == "sw" else (dcp.save, CheckpointException)
    store.named = "rank-00000"
    with pytest.raises(expected):
        call(state(), checkpoint_id="a", storage_writer=writer)
    store.named = ""
    call(state(), checkpoint_id="b", storage_writer=writer)
    code = "access_denied" if own == "sw" else "error"  # DCP tells the writer of no failure
    assert heard.saves == [[False, "plan", code], [False, *PHASES, None]]
    assert [event.checkpoint_id for event in heard.of(SaveEnded)] == ["a", "b"]


def test_a_background_save_that_fails_is_told_though_nobody_asks(url, heard):
    store = Refusing(open_store(url))
    writer = sw.CkptStoreWriter(store, observer=heard)
    store.named = "rank-00000"
    future = sw.async_save(state(), checkpoint_id="a", storage_writer=writer)
    with pytest.raises(Exception, match="denied"):
        future.result()
    ((_, *_, error),) = heard.saves
    assert error == "access_denied"


def test_a_fenced_writer_hears_so(url, heard):
    writer = sw.CkptStoreWriter(url, observer=heard)
    sw.save(state(), checkpoint_id="a", storage_writer=writer)
    claim(RunLog.open(open_store(url)), Incarnation.new(job="other", host="elsewhere"))
    with pytest.raises(FencedError):
        sw.save(state(), checkpoint_id="c", storage_writer=writer)
    assert heard.saves[-1] == [False, "fenced"]


def test_a_save_that_is_skipped_is_told(url, heard):
    going = threading.Event()

    class Waiting(TappedStore):
        def __init__(self, inner):
            super().__init__(inner, lambda call, act: (("rank-" in call.key and going.wait(20)), act())[1])

    writer = sw.CkptStoreWriter(Waiting(open_store(url)), when_busy="skip", observer=heard)
    first = sw.async_save(state(), checkpoint_id="a", storage_writer=writer)
    assert sw.async_save(state(), checkpoint_id="b", storage_writer=writer).skipped
    going.set()
    first.result()
    assert heard.of(SaveSkipped) == [SaveSkipped("b")]
    assert len(heard.saves) == 1


def test_the_log_tells_of_the_newest_checkpoints(writer, heard, url):
    sw.save(state(), checkpoint_id="a", storage_writer=writer)
    writer.describe(global_step=7)
    sw.save(state(), checkpoint_id="b", storage_writer=writer)
    points = heard.of(RecoveryPoints)
    assert [event.committed.global_step for event in points] == [None, 7]
    assert [event.committed.seq for event in points] == [event.seq for event in heard.of(Committed)]
    assert {(event.verified, event.proved) for event in points} == {(None, None)}
    CheckpointStore.open(url).prove("a", verdict="proved: 5 steps")
    CheckpointStore.open(url).prove("b", verdict="differs: loss")
    sw.save(state(), checkpoint_id="c", storage_writer=writer)
    assert heard.of(RecoveryPoints)[-1].proved == points[0].committed


def test_a_load_that_ends_well_and_one_that_fails_are_told(url, heard):
    sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    sw.load(state(), storage_reader=sw.CkptStoreReader(url, observer=heard))
    assert [event.checkpoint_id for event in heard.of(Loaded)] == ["a"]
    with pytest.raises(NotFoundError):
        sw.load(state(), storage_reader=sw.CkptStoreReader(url, checkpoint_id="b", observer=heard))
    assert heard.of(RestoreFailed, DamageFound) == [RestoreFailed("b", "not_found")]


def test_damage_is_told_with_the_key_that_it_was_found_in(url, heard):
    sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    store = open_store(url)
    (key,) = (info.key for info in store.list("data/") if "rank-" in info.key)
    body = bytearray(store.get(key, max_bytes=1 << 20))
    body[-1] ^= 1
    store.put(key, bytes(body))
    with pytest.raises(IntegrityError):
        sw.load(state(), storage_reader=sw.CkptStoreReader(url, observer=heard))
    assert heard.of(RestoreFailed, DamageFound) == [DamageFound(key), RestoreFailed(None, "integrity")]


def test_several_observers_hear_all_whatever_one_of_them_raises(url, heard):
    def raising(event):
        raise UnavailableError("This observer fails.")

    sw.save(state(), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url, observer=together(raising, heard)))
    assert heard.saves == [[False, *PHASES, None]]


def test_every_event_of_a_save_survives_pickling(writer, heard):
    sw.save(state(), checkpoint_id="a", storage_writer=writer)
    assert pickle.loads(pickle.dumps(list(heard))) == list(heard)  # noqa: S301  (our own)


def saved_with_a_failure_on_rank_1(url):
    heard = Heard()
    store = Refusing(open_store(url))
    writer = sw.CkptStoreWriter(store, observer=heard)
    sw.save(state(), checkpoint_id="a", storage_writer=writer)
    store.named = "rank-00001" if dist.get_rank() == 1 else ""
    with pytest.raises(Exception, match="denied"):
        sw.save({"w": state(), f"own{dist.get_rank()}": torch.ones(3)}, checkpoint_id="b", storage_writer=writer)
    dcp.save(state(), checkpoint_id="c", storage_writer=writer)
    return heard.saves


def test_every_rank_hears_how_a_save_ended_and_only_rank_0_of_its_commit(gang, tmp_path):
    first, other = gang.values(2, saved_with_a_failure_on_rank_1, str(tmp_path / "run"))
    assert first[0] == [False, *PHASES, None]
    assert other[0] == [False, "plan", "upload", None]
    assert (first[1], other[1]) == ([False, "plan", "upload", "access_denied"], [False, "plan", "access_denied"])
    assert first[2] == [False, *PHASES, None]
    assert len(other) == 2  # of DCP's own call rank 1 would not hear the end
