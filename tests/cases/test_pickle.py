"""Pickle in a bucket never runs, and plain values do not need it."""

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import io
import math
import pathlib
import pickle
import random
import re
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from refusals import LOADS, SAVES, checked, command, raised, told

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import UnsafePickleError, UnsupportedError
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta, lay_out
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.log import RunLog
from ckptstore.transfer.upload import upload_shard


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


def poisoned(url, body, *, pickled):
    """Commit a checkpoint that holds `body` as the value `job.v`, with every hash right, as our own writer would."""
    log = RunLog.create(open_store(url))
    incarnation = Incarnation.new(job="mallory")
    attempt = begin(log, incarnation, checkpoint_id="step-1", world_size=1)
    weight = torch.arange(4.0).numpy().tobytes()
    chunks = [
        Chunk(TensorMeta("w", "float32", (4,)), (0,), (4,), 16),
        Chunk(TensorMeta("job.v", "bytes", (len(body),)), (0,), (len(body),), len(body), "torch.save", pickled),
    ]
    layout, options = lay_out(chunks), TransferOptions()
    bodies = [[[weight], [body]][index] for index in layout.order]
    shard = upload_shard(log.store, attempt.stem.shard_key(0), layout, bodies, rank=0, options=options)
    planner = {"dict": [["w", {"tuple": ["w"]}], ["job.v", {"tuple": ["job", "v"]}]]}
    commit(log, incarnation, attempt, [StoredShard(shard, layout.items)], planner=planner)


def as_torch_saves(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def as_torch_saved_before(value):
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


BODIES = {
    "torch.save": as_torch_saves,
    "torch.save, inside of a value": lambda payload: as_torch_saves({"a": [1, (payload,)]}),
    "torch.save as it was before 1.6": as_torch_saved_before,
    "bare pickle": pickle.dumps,
    "bare pickle of protocol 0": lambda payload: pickle.dumps(payload, protocol=0),
}


@pytest.mark.parametrize("pickled", [False, True], ids=["unmarked", "marked as pickle"])
@pytest.mark.parametrize(
    ("root", "form"),
    [("file", form) for form in BODIES] + [pytest.param("s3", "torch.save", marks=pytest.mark.servers)],
    indirect=["root"],
)
def test_a_payload_whose_hashes_are_all_right_never_runs(root, tmp_path, form, pickled):
    marker = tmp_path / "ran"
    poisoned(root, BODIES[form](Payload(str(marker))), pickled=pickled)
    for call in LOADS:
        for options in ({}, {"verify_first": True}) if pickled else ({}, {"allow_pickle": True}):
            target = {"w": torch.zeros(4), "job": {"v": None}}
            reader = sw.CkptStoreReader(root, **options)
            told(lambda call=call, t=target, r=reader: LOADS[call](t, storage_reader=r), UnsafePickleError, "job.v")
            assert not target["w"].any()
    target = {"w": torch.zeros(4)}
    sw.load(target, storage_reader=sw.CkptStoreReader(root, only=("w",)))
    assert target["w"].tolist() == [0, 1, 2, 3]
    checkpoint = CheckpointStore.open(root).latest()
    assert checkpoint.read("job.v").tobytes() == BODIES[form](Payload(str(marker)))
    for arguments in (("ls",), ("ls", "--all"), ("show",), ("show", "--keys"), ("tree",), ("log",), ("latest",)):
        assert command(arguments[0], root, *arguments[1:])[0] == 0
    for level in ("chain", "exists", "etag", "full"):
        code, document = command("verify", root, "--all", "--level", level)
        assert (code, document["ok"]) == (0, True)  # it is what was written
    assert not marker.exists()


def test_the_payload_would_run_and_does_for_who_asks_for_it_on_both_sides(tmp_path):
    """Otherwise the test above could not fail."""
    marker = tmp_path / "ran"
    poisoned(tmp_path / "run", as_torch_saves(Payload(str(marker))), pickled=True)
    target = {"w": torch.zeros(4), "job": {"v": None}}
    sw.load(target, storage_reader=sw.CkptStoreReader(tmp_path / "run", allow_pickle=True))
    target["job"]["v"].close()
    assert marker.exists()


def test_a_payload_in_place_of_any_object_of_a_run_never_runs(tmp_path):
    """Wherever it lies: nothing of a run is ever read as pickle."""
    run, marker = tmp_path / "run", tmp_path / "ran"
    state = {"w": torch.arange(4.0), "job": {"v": (1, 2)}}
    sw.save(state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(run))
    store, body = open_store(str(run)), as_torch_saves(Payload(str(marker)))
    for key in [info.key for info in store.list("")] + [".metadata", "data/.metadata"]:
        before = store.get(key, max_bytes=1 << 20) if "metadata" not in key else None
        store.put(key, body)
        target = {"w": torch.zeros(4), "job": {"v": None}}
        raised(lambda target=target: sw.load(target, storage_reader=sw.CkptStoreReader(run)))
        for arguments in (("ls", "--all"), ("show", "--keys"), ("verify", "--all", "--level", "full")):
            command(arguments[0], run, *arguments[1:])
        assert not marker.exists(), key
        store.delete(key) if before is None else store.put(key, before)


class Phase(enum.Enum):
    WARM = 1


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Point(NamedTuple):
    x: int
    y: int


def filled_counter():
    return collections.Counter("aab")


def plain_values():
    """Return values that come back as they are, by name; each call gives equal ones."""
    rng = np.random.RandomState(5)
    default = collections.defaultdict(list)
    default["a"].append(1)
    return {
        "numpy's state": rng.get_state(),
        "python's state": random.Random(5).getstate(),  # noqa: S311  (no secret)
        "float64": np.float64(0.1),
        "float32": np.float32(0.1),
        "int64": np.int64(-5),
        "bool_": np.True_,
        "datetime64": np.datetime64("2026-01-02"),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "text array": np.array(["a", "ñ"]),
        "aware": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
        "naive": dt.datetime(2026, 1, 2),  # noqa: DTZ001  (the point)
        "date": dt.date(2026, 1, 2),
        "timedelta": dt.timedelta(days=-1, microseconds=1),
        "path": pathlib.PurePosixPath("/a/ñ"),
        "here": pathlib.Path("relative/to/here"),
        "ordered": (collections.OrderedDict(b=1, a=2),),
        "default": (default,),
        "deque": collections.deque([1, 2, 3], maxlen=3),
        "counter": (filled_counter(),),
        "set": {1, "a", (2, 3)},
        "frozenset": frozenset({1}),
        "bytes": b"\0\xff",
        "bytearray": bytearray(b"x"),
        "complex": complex(1, -0.0),
        "range": range(1, 10, 3),
        "slice": slice(1, None, 2),
        "large": 2**5000,
        "text": "\ud800 ñ \0",
        "none": None,
        "true": True,
        "infinity": -math.inf,
        "tuple": (1, [2, {"x": (3,)}]),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "keys": ({1: "a", (2, 3): "b", None: "c"},),
    }


REFUSED = {
    "dataclass": Config,
    "partial": lambda: partial(int, "5"),
    "enum": lambda: Phase.WARM,
    "namedtuple": lambda: Point(1, 2),
    "decimal": lambda: decimal.Decimal("0.1"),
    "pattern": lambda: re.compile("x"),
    "lambda": lambda: lambda: 1,
    "open file": lambda: io.TextIOWrapper(io.BytesIO()),
    "generator": torch.Generator,
    "random": lambda: random.Random(1),  # noqa: S311  (no secret)
    "defaultdict of a lambda": lambda: (collections.defaultdict(lambda: 1),),
    "exception": lambda: ValueError("x"),
}


NOT_EVEN_PICKLED = {"lambda", "open file", "defaultdict of a lambda"}


def equal(one, other):
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        same_factory = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return type(one) is type(other) and same_factory and list(one.items()) == list(other.items())
    return type(one) is type(other) and one == other and getattr(one, "maxlen", None) == getattr(other, "maxlen", None)


def round_trip_of_all(url, save_call, load_call):
    """Save all plain values on every rank, load them, and return the names of those that came back otherwise."""
    state = {"w": torch.arange(3.0), "job": plain_values()}
    SAVES[save_call](state, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    target = {"w": torch.zeros(3), "job": dict.fromkeys(plain_values(), "blank")}
    LOADS[load_call](target, storage_reader=sw.CkptStoreReader(url))
    return [name for name, value in plain_values().items() if not equal(value, target["job"][name])]


@pytest.mark.parametrize("calls", [("sw.save", "sw.load"), ("dcp.save", "dcp.load")], ids=str)
def test_plain_values_come_back_with_their_types_on_every_rank(gang, root, calls):
    assert gang.values(2, round_trip_of_all, root, *calls) == [[], []]


def containers_that_dcp_takes_apart(url):
    """A mapping on the way to a value is the target's own: it keeps its type."""

    def make(seed):
        default = collections.defaultdict(list, {"a": seed})
        return {
            "w": torch.full((2,), float(seed)),
            "ordered": collections.OrderedDict(b=seed, a=seed),
            "default": default,
            "counter": collections.Counter({"x": seed}),
        }

    sw.save(make(7), checkpoint_id="a", storage_writer=sw.CkptStoreWriter(url))
    target = make(0)
    sw.load(target, storage_reader=sw.CkptStoreReader(url))
    return all(equal(target[name], value) for name, value in make(7).items() if name != "w")


def test_mappings_in_the_state_keep_the_type_that_the_target_has(gang, tmp_path):
    assert gang.values(2, containers_that_dcp_takes_apart, str(tmp_path / "run")) == [True, True]


def save_what_is_refused(url, who, call):
    """Return what each value was refused with, by name; only the ranks `who` have it."""
    errors = {}
    for name, make in REFUSED.items():
        mine = {"deep": ({"v": make()},)} if dist.get_rank() in who else {}
        state = {"w": torch.arange(3.0), "job": {"n": 5, **mine}}
        writer = sw.CkptStoreWriter(url)
        errors[name] = sw.cause(raised(partial(SAVES[call], state, checkpoint_id="a", storage_writer=writer)))
    return errors


@pytest.mark.parametrize(("who", "call"), [([0, 1], "sw.save"), ([1], "dcp.save")], ids=str)
def test_what_needs_pickle_is_refused_on_all_ranks_with_its_key_before_any_data(gang, root, who, call):
    one, other = gang.values(2, save_what_is_refused, root, who, call)
    for name in REFUSED:
        kind = UnsupportedError if name in NOT_EVEN_PICKLED else UnsafePickleError
        for error in (one[name], other[name]):
            checked(error, kind, "job.deep", *(["Rank 1"] if who == [1] else []))
        assert str(one[name]) == str(other[name])
    assert list(open_store(root).list("data/")) == []
    assert CheckpointStore.open(root).latest() is None
