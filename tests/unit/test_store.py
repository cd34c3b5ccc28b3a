"""The desk: a run looked at, read, pinned and rolled back, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import get_args, get_type_hints

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3

import ckptstore
from ckptstore import (
    Checkpoint,
    CheckpointStore,
    ConflictError,
    Entry,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    ResumeError,
    UncommittedError,
    UnsupportedError,
    Verdict,
)
from ckptstore.format.dtypes import DTYPES, array_dtype
from ckptstore.format.layout import LATEST_KEY, slot_key
from ckptstore.format.records import Claim, Commit, Pin
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta, lay_out
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.protocol.attempt import Description, begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated
from ckptstore.transfer.upload import upload_shard

ARRAYS = sorted(name for name, dtype in DTYPES.items() if dtype.array and not dtype.refused)
"""Every element type that NumPy or ml_dtypes may have."""


@dataclass
class Run:
    """A run under construction, and its URL for the desk."""

    url: str
    log: RunLog
    job: Incarnation

    def save(self, name, **more):
        return simulated.save(self.log, self.job, name, **more)

    def abandon(self, name, *, ranks=2):
        """Upload some shards, and no more."""
        attempt = begin(self.log, self.job, checkpoint_id=name, world_size=3)
        for rank in range(ranks):
            simulated.upload(self.log.store, attempt, rank)
        return attempt

    def save_arrays(self, name, arrays, *, world_size=4):
        """Save each (dtype, array) split over the ranks on its first dimension; what has none is rank 0's."""
        attempt = begin(self.log, self.job, checkpoint_id=name, world_size=world_size)
        shards = []
        for rank in range(world_size):
            pieces = [piece for key, (dtype, array) in arrays.items() for piece in pieces_of(key, dtype, array, rank)]
            if pieces:
                layout = lay_out([chunk for chunk, _ in pieces])
                bodies = [[pieces[at][1]] for at in layout.order]
                path, options = attempt.stem.shard_key(rank), TransferOptions()
                shard = upload_shard(self.log.store, path, layout, bodies, rank=rank, options=options)
                shards.append(StoredShard(shard, layout.items))
        return commit(self.log, self.job, attempt, shards)


def pieces_of(key, dtype, array, rank, *, world_size=4):
    """Return the chunk that `rank` holds with its bytes, or nothing."""
    low, high = 0, None
    if array.ndim and array.size and dtype != "bytes":
        low, high = (at * len(array) // world_size for at in (rank, rank + 1))
    elif rank:
        return []
    piece = array[low:high] if array.ndim else array
    offsets = (low, *[0] * (array.ndim - 1))[: array.ndim]
    codec = "torch.save" if dtype == "bytes" else None
    chunk = Chunk(TensorMeta(key, dtype, array.shape), offsets, piece.shape, piece.nbytes, codec=codec)
    return [(chunk, piece.tobytes())]


def begun(url):
    store = open_store(url)
    return Run(url, RunLog.create(store), Incarnation.new(job="gpt"))


@pytest.fixture(params=["memory", "path"])
def run(request, tmp_path):
    return begun(f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path / "run"))


def saved(rank_count, seed):
    return np.concatenate([simulated.values(rank, seed) for rank in range(rank_count)])


def test_the_latest_is_the_newest_commit_and_not_the_highest_step(run):  # I11
    run.save("step-20", step=20)
    run.save("step-10", step=10)
    latest = CheckpointStore.open(run.url).latest()
    assert (latest.checkpoint_id, latest.global_step, latest.saved_world_size) == ("step-10", 10, 3)
    assert latest.metrics == {"seed": 0.0}
    assert latest.committed_at.endswith("Z")


def test_an_open_store_sees_what_is_committed_later(run):
    store = CheckpointStore.open(run.url)
    assert store.latest() is None
    run.save("a")
    assert store.latest().checkpoint_id == "a"


def test_opening_an_absent_run_creates_nothing(tmp_path):
    store = CheckpointStore.open(tmp_path / "absent")
    assert (store.run, store.latest(), store.checkpoints(), store.uncommitted()) == (None, None, [], [])
    assert list(store.records()) == []
    assert store.verify(level="chain").ok
    assert list(tmp_path.iterdir()) == []


def test_opening_a_run_that_is_there_writes_nothing_to_it(tmp_path):
    run = begun(str(tmp_path / "run"))
    run.save("a")

    def files():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    store = CheckpointStore.open(run.url)
    store.latest().read(simulated.NAME)
    store.verify(store.latest(), level="full")
    assert files() == before


def test_a_checkpoint_is_got_by_name_by_step_by_seq_and_exactly(run):
    first = run.save("again", step=5, seed=1)
    second = run.save("again", step=5, seed=2)
    store = CheckpointStore.open(run.url)
    assert store.get("again").seq == store.get(step=5).seq == second.seq
    assert store.get(f"again@{first.seq}").seq == store.get(seq=first.seq).seq == first.seq
    assert np.array_equal(store.get(seq=first.seq).read(simulated.NAME), saved(3, 1))


def test_what_is_not_there_is_not_found_and_what_is_near_is_named(run):
    run.save("step-1000", step=1000)
    store = CheckpointStore.open(run.url)
    with pytest.raises(NotFoundError, match="step-1000"):
        store.get("step-1001")
    for wrong in ({"step": 3}, {"seq": 77}, {"checkpoint_id": "step-1000@77"}, {"checkpoint_id": "other@1"}):
        with pytest.raises(NotFoundError):
            store.get(**wrong)


@pytest.mark.parametrize("asked", [{}, {"step": 1, "seq": 1}])
def test_a_lookup_by_none_or_by_two_is_refused(run, asked):
    with pytest.raises(InvalidInputError):
        CheckpointStore.open(run.url).get(**asked)


def test_a_name_of_too_many_digits_is_refused_and_nothing_breaks(run):
    with pytest.raises(InvalidInputError):
        CheckpointStore.open(run.url).get("a@" + "9" * 5000)


def test_checkpoints_are_listed_newest_first_and_those_set_aside_on_demand(run):
    seqs = [run.save(name).seq for name in "abc"]
    store = CheckpointStore.open(run.url)
    store.rollback(store.get("b"))
    assert [each.seq for each in store.checkpoints()] == [seqs[1], seqs[0]]
    assert [each.seq for each in store.checkpoints(include_set_aside=True)] == seqs[::-1]


def test_data_without_a_commit_is_listed_as_what_it_is(run):
    run.abandon("dead", ranks=2)
    run.save("whole")
    run.abandon("young", ranks=1)
    store = CheckpointStore.open(run.url)
    found = {each.stem.name: (each.state, each.objects) for each in store.uncommitted()}
    assert found == {"dead": ("dead", 2), "young": ("in progress", 1)}
    assert all(each.bytes > 0 for each in store.uncommitted())
    with pytest.raises(UncommittedError, match="never committed"):
        store.get("young")


def test_a_new_claim_makes_what_was_in_progress_dead_and_has_not_committed(run):  # I7
    run.abandon("a")
    store = CheckpointStore.open(run.url)
    assert (store.reign.job, store.reign_has_committed) == ("gpt", False)
    run.job = Incarnation.new(job="next", host="node-7")
    run.abandon("b")
    assert [(each.stem.name, each.state) for each in store.uncommitted()] == [("a", "dead"), ("b", "in progress")]
    assert (store.reign.job, store.reign.host, store.reign.term) == ("next", "node-7", 2)
    run.save("c")
    store.latest()
    assert store.reign_has_committed


def test_the_records_come_in_order(run):
    run.save("a")
    store = CheckpointStore.open(run.url)
    store.pin(store.latest(), holder="eval")
    entries = list(store.records())
    assert [type(entry.record) for entry in entries] == [Claim, Commit, Pin]
    assert [entry.seq for entry in entries] == [0, 1, 2]


def test_a_damaged_log_is_refused_and_says_what_is_before_the_damage(run):
    for name in "abc":
        run.save(name)
    store = open_store(run.url)
    body = bytearray(store.get(slot_key(2), max_bytes=1 << 16))
    body[100] ^= 1
    store.put(slot_key(2), bytes(body))
    with pytest.raises(IntegrityError, match=slot_key(2)):
        CheckpointStore.open(run.url)
    assert [entry.seq for entry in CheckpointStore.readable_records(run.url)] == [0, 1]


def test_a_tail_that_was_lost_is_told(run):
    run.save("a")
    last = run.save("b")
    open_store(run.url).delete(slot_key(last.seq))
    store = CheckpointStore.open(run.url)
    assert store.lost_from == last.seq
    assert store.latest().checkpoint_id == "a"
    open_store(run.url).delete(LATEST_KEY)
    assert CheckpointStore.open(run.url).lost_from is None  # I10: nothing tells, and the answer is the same


def test_pins_are_held_by_name_and_say_whether_they_are_news(run):
    run.save("a")
    store = CheckpointStore.open(run.url)
    assert store.pin(store.latest(), holder="eval", reason="nightly")
    assert not store.pin(store.latest(), holder="eval", reason="nightly")
    assert store.pin(store.latest(), holder="release")
    assert [(pin.holder, pin.reason) for pin in store.latest().committed.pins] == [("eval", "nightly"), ("release", "")]
    assert store.unpin(store.latest(), holder="eval")
    assert not store.unpin(store.latest(), holder="eval")
    assert [pin.holder for pin in store.latest().committed.pins] == ["release"]


def test_a_roll_back_sets_aside_what_lies_above_and_the_next_save_goes_on(run):
    seqs = [run.save(name).seq for name in "abc"]
    store = CheckpointStore.open(run.url)
    assert store.rollback(store.get("a"), note="loss spike") == seqs[1:]
    assert store.latest().seq == seqs[0]
    assert store.rollback(store.get("a")) == []
    assert store.get(f"c@{seqs[2]}").committed.set_aside == "abandoned"
    with pytest.raises(NotFoundError, match="set aside"):
        store.get("c")
    with pytest.raises(InvalidInputError, match="set aside"):
        store.rollback(store.get(seq=seqs[2]))
    run.job = Incarnation.new(job="gpt")
    assert run.save("d").seq == store.latest().seq


def test_what_is_set_aside_is_restored_and_says_whether_that_is_news(run):
    seqs = [run.save(name).seq for name in "abc"]
    store = CheckpointStore.open(run.url)
    assert store.set_aside(store.get("c"), reason="quarantined", note="a flipped bit, read twice")
    assert not store.set_aside(store.get(f"c@{seqs[2]}"), reason="abandoned")
    assert store.latest().seq == seqs[1]
    assert store.restore(f"c@{seqs[2]}")
    assert not store.restore(f"c@{seqs[2]}")
    assert store.latest().seq == seqs[2]
    store.rollback("a")
    for seq in seqs[1:]:
        assert store.restore(store.get(seq=seq))
    assert [each.seq for each in store.checkpoints()] == seqs[::-1]
    with pytest.raises(InvalidInputError, match="no reason"):
        store.set_aside("c", reason="because")


def test_a_checkpoint_may_be_given_by_name(run):
    seqs = [run.save(name).seq for name in ("a", "b", "b")]
    store = CheckpointStore.open(run.url)
    for name, seq in (("b", seqs[2]), (f"b@{seqs[1]}", seqs[1]), ("a", seqs[0])):
        assert store.pin(name, holder="eval")
        assert [pin.holder for pin in store.get(seq=seq).committed.pins] == ["eval"]
        assert store.verify(name).seq == seq
        assert store.unpin(name, holder="eval")
    assert store.rollback("a", note="x") == seqs[1:]
    for act in (store.restore, store.rollback, store.verify, lambda name: store.pin(name, holder="eval")):
        with pytest.raises(NotFoundError):
            act("b")
        with pytest.raises(InvalidInputError):
            act(7)


def test_commits_of_which_none_may_be_selected_are_no_fresh_start(run):
    seq = run.save("a").seq
    Catalog(run.log).set_aside([seq], reason="quarantined")
    with pytest.raises(ResumeError, match=f"a@{seq}"):
        CheckpointStore.open(run.url).latest()


@pytest.mark.parametrize("dtype", ARRAYS)
def test_every_dtype_reads_back_bit_exact_whole_and_in_boxes(dtype):
    run = begun(f"memory://{dtype}")
    kind = array_dtype(dtype)
    if kind is None:
        pytest.skip(f"this ml_dtypes has no {dtype}")
    bits = np.arange(11 * 6 * kind.itemsize, dtype=np.uint32).astype(np.uint8)
    if dtype == "bool":
        bits &= 1
    array = bits.view(kind).reshape(11, 6)
    run.save_arrays("a", {"w": (dtype, array)})
    checkpoint = CheckpointStore.open(run.url).latest()
    found = checkpoint.read("w")
    assert found.dtype == kind
    assert (found.shape, found.tobytes()) == (array.shape, array.tobytes())
    boxes = ((slice(2, 9),), (slice(None), slice(1, 4)), (slice(3, 3),), (slice(-2, None), slice(0, 100)))
    for index in boxes:
        box = checkpoint.read("w", index)
        assert (box.shape, box.tobytes()) == (array[index].shape, array[index].tobytes())


def test_the_ml_dtypes_are_the_ones_that_numpy_lacks():
    assert array_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert array_dtype("float8_e4m3fn") == np.dtype(ml_dtypes.float8_e4m3fn)


def test_scalars_empty_tensors_and_values_that_are_no_tensors_are_read(run):
    run.save_arrays(
        "a",
        {
            "scalar": ("float32", np.float32(7.5).reshape(())),
            "empty": ("int64", np.zeros((0, 3), np.int64)),
            "value": ("bytes", np.frombuffer(b"not unpickled", np.uint8)),
        },
    )
    checkpoint = CheckpointStore.open(run.url).latest()
    scalar, empty = checkpoint.read("scalar"), checkpoint.read("empty")
    assert (scalar.shape, scalar.dtype, float(scalar)) == ((), np.float32, 7.5)
    assert (empty.shape, empty.dtype) == ((0, 3), np.int64)
    assert checkpoint.read("value").tobytes() == b"not unpickled"


def test_what_numpy_has_no_type_for_comes_as_its_bytes(run):
    packed = np.arange(12, dtype=np.uint8).reshape(4, 3)
    run.save_arrays("a", {"w": ("float4_e2m1fn_x2", packed)})
    found = CheckpointStore.open(run.url).latest().read("w", [slice(1, 3)])
    assert (found.shape, found.dtype) == ((2, 3, 1), np.uint8)
    assert np.array_equal(found[..., 0], packed[1:3])


def test_an_array_that_was_read_belongs_to_the_caller(run):
    run.save("a", seed=1)
    checkpoint = CheckpointStore.open(run.url).latest()
    first = checkpoint.read(simulated.NAME)
    first[:] = 0
    assert np.array_equal(checkpoint.read(simulated.NAME), saved(3, 1))


def test_the_keys_say_dtype_shape_and_bytes_sorted_by_name(run):
    arrays = {"b": ("float16", np.ones((6, 2), np.float16)), "a": ("int8", np.ones(5, np.int8))}
    run.save_arrays("x", arrays)
    keys = CheckpointStore.open(run.url).latest().keys
    assert [(key.name, key.dtype, key.shape, key.nbytes) for key in keys.values()] == [
        ("a", "int8", (5,), 5),
        ("b", "float16", (6, 2), 24),
    ]


@pytest.mark.parametrize("is_known", [False, True], ids=["before its manifest was read", "after"])
def test_what_is_retired_and_deleted_while_it_is_read_is_not_called_damaged(run, is_known):
    for name in ("a", "b", "c"):
        run.save(name)
    desk, store = CheckpointStore.open(run.url), open_store(run.url)
    checkpoint = CheckpointStore.open(run.url).get("a")
    assert not is_known or checkpoint.keys
    desk.retire("a", reason="It is old.")
    for info in list(store.list(checkpoint.commit.stem.prefix())):
        store.delete(info.key)
    with pytest.raises(ConflictError, match=r"a@\d was retired while it was read") as caught:
        checkpoint.read(simulated.NAME)
    assert "ckptstore ls" in caught.value.hint


@pytest.mark.parametrize("index", [[slice(0, 2), slice(0, 1)], [slice(0, 4, 2)]])
def test_an_index_that_is_no_box_is_refused(run, index):
    run.save("a")
    with pytest.raises(InvalidInputError, match=simulated.NAME):
        CheckpointStore.open(run.url).latest().read(simulated.NAME, index)


def test_a_key_that_is_not_there_is_not_found(run):
    run.save("a")
    with pytest.raises(NotFoundError, match=r"no key 'model\.wait'"):
        CheckpointStore.open(run.url).latest().read("model.wait")


def test_a_flipped_bit_is_found_by_the_read_that_touches_it_and_by_verify(run):  # I13
    run.save("a")
    store = open_store(run.url)
    checkpoint = CheckpointStore.open(run.url).latest()
    key = checkpoint.commit.stem.shard_key(1)
    body = bytearray(store.get(key, max_bytes=1 << 20))
    position = body.index(simulated.values(1, 0).tobytes())
    body[position + 3] ^= 1
    store.put(key, bytes(body))
    with pytest.raises(IntegrityError, match=key):
        checkpoint.read(simulated.NAME)
    assert np.array_equal(checkpoint.read(simulated.NAME, [slice(0, 4)]), simulated.values(0, 0))
    desk = CheckpointStore.open(run.url)
    assert desk.verify(checkpoint, level="exists").ok
    verdict = desk.verify(checkpoint, level="full")
    assert [(each.kind, each.key) for each in verdict.findings if each.level == "full"] == [("damaged", key)]


def test_a_missing_and_a_cut_shard_are_found_without_reading_them(run):  # I4
    run.save("a")
    store = open_store(run.url)
    desk = CheckpointStore.open(run.url)
    stem = desk.latest().commit.stem
    store.delete(stem.shard_key(0))
    store.put(stem.shard_key(2), store.get(stem.shard_key(2), max_bytes=1 << 20)[:-1])
    found = desk.verify(desk.latest()).findings
    assert [(each.kind, each.key) for each in found] == [("missing", stem.shard_key(0)), ("size", stem.shard_key(2))]


def test_all_that_is_kept_is_verified_with_one_verdict_on_the_log(run):
    seqs = [run.save(name).seq for name in "abc"]
    desk = CheckpointStore.open(run.url)
    desk.rollback(desk.get("b"))
    open_store(run.url).delete(desk.get("b").commit.stem.shard_key(1))
    verdicts = list(desk.verify_kept(level="full"))
    assert [(each.seq, each.ok) for each in verdicts] == [
        (None, True),
        (seqs[2], True),
        (seqs[1], False),
        (seqs[0], True),
    ]


def test_without_a_checkpoint_the_log_alone_is_verified(run):
    run.save("a")
    desk = CheckpointStore.open(run.url)
    assert (desk.verify().level, desk.verify().seq) == ("chain", None)
    assert desk.verify(desk.latest()).level == "exists"


def test_progress_ends_at_all_of_the_bytes(run):
    run.save("a")
    desk = CheckpointStore.open(run.url)
    told = []
    verdict = desk.verify(desk.latest(), level="full", progress=lambda done, total: told.append((done, total)))
    total = desk.latest().commit.shards.bytes
    assert [each[0] for each in told] == sorted(each[0] for each in told)
    assert {each[1] for each in told} == {total}
    assert told[-1] == (total, total)
    assert verdict.bytes_read == total


def test_a_level_that_is_none_is_refused(run):
    run.save("a")
    desk = CheckpointStore.open(run.url)
    for checkpoint, level in ((None, "full"), (desk.latest(), "deep")):
        with pytest.raises(InvalidInputError):
            desk.verify(checkpoint, level=level)


def test_a_record_of_a_later_release_stops_answers_but_not_the_list_of_records(run):
    run.save("a")
    body = b'{"format":2,"kind":"MERGE","prev":"%s","run":"%s","seq":2,"writer":"w","written_at":"later"' % (
        run.log.fold.last.encode(),
        run.log.run.encode(),
    )
    open_store(run.url).put(slot_key(2), body + b',"self":"' + blake3(body).hexdigest().encode() + b'"}\n')
    desk = CheckpointStore.open(run.url)
    with pytest.raises(UnsupportedError, match="MERGE"):
        desk.latest()
    seen = []
    with pytest.raises(UnsupportedError, match="MERGE"):
        seen.extend(entry.seq for entry in desk.records())
    assert [entry.seq for entry in CheckpointStore.readable_records(run.url)][:2] == [0, 1]


def test_one_tensor_of_a_checkpoint_of_four_ranks_is_read_without_torch_or_a_cloud_client(tmp_path):
    begun(str(tmp_path / "run")).save("a", world_size=4, seed=3)
    script = f"""
import sys
import ckptstore
latest = ckptstore.CheckpointStore.open({str(tmp_path / "run")!r}).latest()
print(latest.saved_world_size, latest.read({simulated.NAME!r}).tolist())
heavy = {{"torch", "safetensors", "obstore", "aiobotocore", "botocore", "fsspec", "s3fs", "typer", "rich"}}
print(sorted(heavy & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == [f"4 {saved(4, 3).tolist()}", "[]"]


def test_the_menu_has_whatever_the_desk_takes_and_returns():
    public = {name: kind for name, kind in vars(ckptstore).items() if name in ckptstore.__all__}
    assert set(public) == set(ckptstore.__all__)
    assert len(public) <= 40
    desk = [
        getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        for kind in (CheckpointStore, Checkpoint)
        for name, member in vars(kind).items()
        if not name.startswith("_") and (callable(member) or hasattr(type(member), "__get__"))
    ]
    named = {kind for each in desk for hint in get_type_hints(each).values() for kind in classes_in(hint)}
    assert {Verdict, Checkpoint, Entry} <= named
    assert {kind.__name__ for kind in named if kind.__module__.startswith("ckptstore")} <= set(public)


def classes_in(hint):
    """Return the classes that an annotation is made of."""
    inner = [kind for each in get_args(hint) if not isinstance(each, (str, list)) for kind in classes_in(each)]
    return [hint, *inner] if isinstance(hint, type) else inner


def test_a_description_that_is_not_finite_is_kept(run):
    attempt = begin(
        run.log,
        run.job,
        checkpoint_id="a",
        world_size=1,
        description=Description(metrics={"loss": float("nan"), "best": float("-inf")}, tags=["x"]),
    )
    commit(run.log, run.job, attempt, [simulated.upload(run.log.store, attempt, 0)])
    metrics = CheckpointStore.open(run.url).latest().metrics
    assert np.isnan(metrics["loss"])
    assert metrics["best"] == -np.inf


def test_what_the_run_did_next_and_that_a_resume_did_the_same_is_told_of_a_checkpoint(run):
    run.save("a")
    run.save("b")
    desk = CheckpointStore.open(run.url)
    latest = desk.latest()
    assert (latest.trace(), latest.proved, latest.verified) == (None, None, None)
    desk.write_trace(latest, {"observations": [{"global_step": 1, "loss": 0.5}]})
    assert desk.prove("b", verdict="1 step the same")
    assert not desk.prove(latest, verdict="1 step the same")
    found = CheckpointStore.open(run.url).get("b")
    assert found.trace() == {"observations": [{"global_step": 1, "loss": 0.5}]}
    assert found.proved == "1 step the same"
    assert CheckpointStore.open(run.url).get("a").trace() is None
    assert desk.uncommitted() == []
    assert desk.verify("b", level="full").ok
