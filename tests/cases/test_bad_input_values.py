"""What is described, chosen or put into a state and makes no sense: refused by name, before any data is written."""

import io
import json
import math
import socket
import threading
from functools import partial

import numpy as np
import pytest
import torch
from refusals import LOADS, SAVES, command, command_told, contents, load, loaded, nothing_written, save, state, told

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import InvalidInputError, NotFoundError, UnsafePickleError, UnsupportedError
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions, TransferOptions


def deep(levels):
    return {"x": deep(levels - 1)} if levels else {}


ABSURD = [
    ({"global_step": True}, "global_step"),
    ({"global_step": -1}, "global_step"),
    ({"global_step": 2**70}, "global_step"),
    ({"global_step": 10**5000}, "global_step"),
    ({"global_step": 1.0}, "global_step"),
    ({"global_step": torch.tensor(3)}, "global_step"),
    ({"metrics": {"loss": "low"}}, "metrics['loss']"),
    ({"metrics": {"loss": None}}, "metrics['loss']"),
    ({"metrics": {"loss": torch.tensor(1.0)}}, "metrics['loss']"),
    ({"metrics": {"loss": 10**400}}, "metrics['loss']"),
    ({"metrics": {1: 1.0}}, "metrics"),
    ({"metrics": [("loss", 1.0)]}, "metrics"),
    ({"metrics": {f"metric-{number}": 1.0 for number in range(1500)}}, "16384"),
    ({"tags": [1]}, "tag"),
    ({"tags": [None]}, "tag"),
    ({"tags": 5}, "tags"),
    ({"tags": ["\ud800"]}, "tags[0]"),
    ({"tags": ["x" * 20_000]}, "16384"),
    ({"parallelism": {"dp": "8"}}, "parallelism['dp']"),
    ({"parallelism": {"dp": -1}}, "parallelism['dp']"),
    ({"parallelism": [("dp", 8)]}, "parallelism"),
    ({"training_state": {"seen": {1, 2}}}, "training_state['seen']"),
    ({"training_state": {"a": [{"b": ({1},)}]}}, "training_state['a'][0]['b'][0]"),
    ({"training_state": {"a": b"x"}}, "training_state['a']"),
    ({"training_state": {"a": np.int64(1)}}, "training_state['a']"),
    ({"training_state": {(1, 2): 3}}, "training_state"),
    ({"training_state": deep(40)}, "training_state"),
    ({"fingerprints": {"data": 5}}, "fingerprints['data']"),
    ({"fingerprints": "abc"}, "fingerprints"),
]


@pytest.mark.parametrize(("said", "named"), ABSURD, ids=lambda each: each if isinstance(each, str) else "")
def test_what_cannot_be_described_is_refused_at_once_and_the_value_is_named(tmp_path, said, named):
    writer = sw.CkptStoreWriter(tmp_path / "run")
    told(lambda: writer.describe(**said), InvalidInputError, named)
    assert list(tmp_path.iterdir()) == []
    sw.save(state(), checkpoint_id="a", storage_writer=writer)  # as if nothing had been described
    assert CheckpointStore.open(tmp_path / "run").latest().commit.training_state == {}


def test_what_contains_itself_cannot_be_described(tmp_path):
    loop = {}
    loop["x"] = loop
    told(
        lambda: sw.CkptStoreWriter(tmp_path / "run").describe(training_state=loop), InvalidInputError, "training_state"
    )


def test_metrics_that_are_not_finite_are_kept_as_they_are_by_every_face(root):
    writer = sw.CkptStoreWriter(root)
    metrics = {"loss": math.nan, "best": math.inf, "worst": -math.inf, "fine": np.float32(0.5)}
    writer.describe(global_step=np.int64(3), metrics=metrics, training_state={"loss": math.nan})
    sw.save(state(), checkpoint_id="a", storage_writer=writer)
    found = CheckpointStore.open(root).latest()
    assert math.isnan(found.metrics["loss"])
    assert (found.metrics["best"], found.metrics["worst"], found.metrics["fine"]) == (math.inf, -math.inf, 0.5)
    shown = command("show", root)[1]["checkpoint"]
    assert shown["metrics"] == {"loss": "NaN", "best": "Infinity", "worst": "-Infinity", "fine": 0.5}
    json.dumps(shown, allow_nan=False)
    for name in ("ls", "log", "latest", "tree"):
        assert command(name, root)[0] == 0
    assert loaded(root)


WRITER = {
    "takeover": ["never", "same-job", None, True],
    "job": ["", 5, "x" * 2000],
    "agree_timeout_seconds": [0, -1, math.nan, math.inf, "60", None, True],
    "allow_pickle": ["no", 1, None],
    "allow_one_rank": ["no", 1],
    "assume_single_writer": ["no", 0],
    "transfer": [5, {"part_bytes": 5}],
    "log": [5, {"deadline_seconds": 5}],
    "storage_options": [5, {"frob": 1}, "key=x"],
}
READER = {
    "agree_timeout_seconds": [0, math.nan, "60"],
    "allow_missing": ["no"],
    "allow_unexpected": [1],
    "allow_cast": ["no"],
    "allow_pickle": ["no"],
    "verify_first": [0],
    "only": ["model", (), 5, (5,), ("",)],
    "transfer": [5],
    "storage_options": [{"frob": 1}],
    "step": ["1", 1.0, True],
    "seq": ["1", 1.5, True],
}


@pytest.mark.parametrize(
    ("face", "name", "value"),
    [(sw.CkptStoreWriter, name, value) for name, values in WRITER.items() for value in values]
    + [(sw.CkptStoreReader, name, value) for name, values in READER.items() for value in values],
    ids=lambda each: getattr(each, "__name__", repr(each)[:20]),
)
def test_an_option_that_makes_no_sense_is_refused_when_it_is_given_and_is_named(tmp_path, face, name, value):
    error = told(lambda: face(tmp_path / "run", **{name: value}), InvalidInputError)
    assert name in str(error) or "frob" in str(error)
    assert list(tmp_path.iterdir()) == []


FLAGS = ("assume_single_writer", "refuse_lost_tail")


@pytest.mark.parametrize("kind", [LogOptions, TransferOptions])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "5", None, True], ids=repr)
def test_a_number_of_the_options_must_be_one(kind, value):
    for name in kind.__dataclass_fields__:
        if name not in (*FLAGS, "signing"):
            told(lambda name=name: kind(**{name: value}), InvalidInputError, name)
    for wrong in ({"parts_in_flight": 1.5}, {"part_bytes": 1}, {"part_bytes": 2.0**23}):
        told(lambda wrong=wrong: TransferOptions(**wrong), InvalidInputError, next(iter(wrong)))
    for flag in FLAGS:
        told(lambda flag=flag: LogOptions(**{flag: "no"}), InvalidInputError, flag)


@pytest.mark.parametrize(
    "asked", [{"checkpoint_id": "a", "step": 1}, {"checkpoint_id": "a", "seq": 1}, {"step": 1, "seq": 1}], ids=str
)
def test_a_checkpoint_that_is_asked_for_in_several_ways_is_refused_and_the_ways_are_named(tmp_path, asked):
    run = tmp_path / "run"
    save(run, "a")
    with nothing_written(run):
        for work in (lambda: sw.CkptStoreReader(run, **asked), lambda: CheckpointStore.open(run).get(**asked)):
            told(work, InvalidInputError, *(f"{name}={value!r}" for name, value in asked.items()))
    told(lambda: CheckpointStore.open(run).get(), InvalidInputError, "checkpoint_id")


@pytest.mark.parametrize(
    "asked", [{"step": 7}, {"step": -1}, {"seq": 0}, {"seq": 99}, {"seq": -1}, {"seq": 2**70}], ids=str
)
def test_a_step_or_slot_that_is_not_there_is_not_found(tmp_path, asked):
    run = tmp_path / "run"
    save(run, "a")
    for call in LOADS:
        told(lambda call=call: load(run, call=call, **asked), NotFoundError, str(next(iter(asked.values()))))
    told(lambda: CheckpointStore.open(run).get(**asked), NotFoundError)


def test_a_key_or_a_box_that_is_not_there_is_refused(tmp_path):
    save(tmp_path / "run", "a")
    checkpoint = CheckpointStore.open(tmp_path / "run").latest()
    told(lambda: checkpoint.read("model.x"), NotFoundError, "model.x")
    for index in (5, "ab", (5,), (slice("a"),), (slice(0, 4, 2),), (slice(None),) * 3):
        told(lambda index=index: checkpoint.read("model.w", index), InvalidInputError, "model.w")


@pytest.mark.parametrize("holder", ["", 5, None, "x" * 2000, "\ud800"], ids=lambda each: repr(each)[:20])
def test_a_holder_that_cannot_be_recorded_is_refused(tmp_path, holder):
    run = tmp_path / "run"
    save(run, "a")
    store = CheckpointStore.open(run)
    with nothing_written(run):
        told(lambda: store.pin(store.latest(), holder=holder), InvalidInputError)
        if holder != "\ud800":
            told(lambda: store.unpin(store.latest(), holder=holder), InvalidInputError, "holder")
        if holder in ("", "x" * 2000):
            for name in ("pin", "unpin"):
                command_told(name, run, "a", "--holder", holder, kind=InvalidInputError)


@pytest.mark.parametrize("call", SAVES)
def test_an_empty_state_is_refused_before_the_run_is_claimed(root, call):
    for empty in ({}, {"model": {}}, {"model": {"layers": {}}}):
        writer = sw.CkptStoreWriter(root)
        told(partial(SAVES[call], empty, checkpoint_id="a", storage_writer=writer), InvalidInputError, "empty")
        assert set(contents(root)) <= {"run.json"}
    sw.save(state(), checkpoint_id="a", storage_writer=writer)
    assert loaded(root)


class Custom:
    """A class of the user's."""


UNSAFE = {
    "a lambda": (lambda: lambda: 1, UnsupportedError),
    "an open file": (lambda: io.TextIOWrapper(io.BytesIO()), UnsupportedError),
    "a lock": (threading.Lock, UnsupportedError),
    "a module": (lambda: socket, UnsupportedError),
    "a generator": (lambda: (each for each in ()), UnsupportedError),
    "a custom class": (Custom, UnsafePickleError),
    "a function": (lambda: print, UnsafePickleError),
    "a torch module": (lambda: torch.nn.Linear(1, 1), UnsafePickleError),
    "an optimizer": (lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), UnsafePickleError),
    "an array of objects": (lambda: np.array([Custom()]), UnsafePickleError),
}


@pytest.mark.parametrize("call", SAVES)
@pytest.mark.parametrize("what", UNSAFE)
def test_a_value_that_needs_pickle_is_refused_with_its_key_before_any_data_is_written(tmp_path, call, what):
    make, kind = UNSAFE[what]
    run = tmp_path / "run"
    save(run, "a")
    wrong = state() | {"job": {"hooks": (1, make())}}
    with nothing_written(run):
        writer = sw.CkptStoreWriter(run)
        told(lambda: SAVES[call](wrong, checkpoint_id="b", storage_writer=writer), kind, "job.hooks")
    assert loaded(run)


@pytest.mark.parametrize("what", UNSAFE)
def test_a_background_save_refuses_it_too_when_it_is_called_or_through_its_future(tmp_path, what):
    make, kind = UNSAFE[what]
    run = tmp_path / "run"
    wrong, writer = state() | {"job": {"hooks": (1, make())}}, sw.CkptStoreWriter(run)
    told(lambda: sw.async_save(wrong, checkpoint_id="b", storage_writer=writer).result(20), kind, "job.hooks")
    assert not (run / "data").exists()
    sw.async_save(state(), checkpoint_id="c", storage_writer=writer).result(20)
    assert loaded(run)


@pytest.mark.parametrize("wrong", [None, 5, [torch.ones(1)], "state"], ids=lambda each: type(each).__name__)
def test_a_state_that_is_no_dict_and_a_writer_that_is_none_are_refused(tmp_path, wrong):
    run = tmp_path / "run"
    for call in (sw.save, sw.async_save):
        writer = sw.CkptStoreWriter(run)
        told(partial(call, wrong, checkpoint_id="a", storage_writer=writer), InvalidInputError, repr(wrong)[:20])
        told(partial(call, state(), checkpoint_id="a", storage_writer=wrong), InvalidInputError, "CkptStoreWriter")
    told(partial(sw.load, wrong, storage_reader=sw.CkptStoreReader(run)), InvalidInputError, repr(wrong)[:20])
    told(partial(sw.load, state(), storage_reader=wrong), InvalidInputError, "CkptStoreReader")
    assert not run.exists()


@pytest.mark.servers
def test_on_an_object_store_an_unsafe_value_leaves_no_data_either(s3_url):
    for make, kind in UNSAFE.values():
        wrong, writer = {"v": (make(),)}, sw.CkptStoreWriter(s3_url)
        told(partial(sw.save, wrong, checkpoint_id="a", storage_writer=writer), kind, "v")
    assert list(open_store(s3_url).list("data/")) == []
    assert CheckpointStore.open(s3_url).latest() is None
