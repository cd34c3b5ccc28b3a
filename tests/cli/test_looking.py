"""`show`, `tree`."""

from __future__ import annotations

import pytest

from ckptstore.format.documents import encode_documents
from ckptstore.format.records import Collected
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta, lay_out
from ckptstore.format.values import CODEC
from ckptstore.maintenance.collect import retire
from ckptstore.options import TransferOptions
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.commit import commit
from ckptstore.testing import simulated
from ckptstore.transfer.upload import upload_shard


def test_a_checkpoint_is_shown_with_all_that_was_said_of_it(ckptstore, run):
    run.save("before")
    run.save_described(
        "step-7",
        global_step=7,
        parallelism={"dp": 4, "tp": 2},
        training_state={"epoch": 3},
        metrics={"val_loss": 2.5, "spike": float("nan"), "worst": float("-inf")},
        fingerprints={"data": "abc"},
        tags=["nightly", "best"],
        documents=encode_documents({"data": {"files": 3}}),
    )
    ended = ckptstore("show", run.url)
    shown = dict(line.split("  ", 1) for line in ended.lines)
    shown = {name: value.strip() for name, value in shown.items()}
    assert shown["checkpoint id"] == "step-7"
    assert (shown["seq"], shown["global step"], shown["parent"]) == ("2", "7", "1")
    assert shown["parallelism"] == "dp=4, tp=2"
    assert shown["training state"] == "epoch=3"
    assert shown["metrics"] == "spike=nan, val_loss=2.5, worst=-inf"
    assert shown["tags"] == "nightly, best"
    assert shown["documents"] == "fingerprints.json.gz"
    found = ckptstore("show", run.url, "step-7@2", "--json").json["checkpoint"]
    assert found["metrics"] == {"spike": "NaN", "val_loss": 2.5, "worst": "-Infinity"}
    assert (found["parallelism"], found["tags"]) == ({"dp": 4, "tp": 2}, ["nightly", "best"])
    assert (found["shards"], found["saved_world_size"], found["set_aside"]) == (1, 1, None)
    assert found["documents"].endswith("/fingerprints.json.gz")
    assert ckptstore("show", run.url, "before", "--json").json["checkpoint"]["documents"] is None


def test_the_keys_are_shown_on_demand(ckptstore, run):
    run.save("a", world_size=3)
    assert simulated.NAME not in ckptstore("show", run.url).out
    ended = ckptstore("show", run.url, "a", "--keys")
    assert ended.lines[-1].split() == ["float32", "12", "48", "B", simulated.NAME]
    found = ckptstore("show", run.url, "--keys", "--json").json["keys"]
    assert found == [{"name": simulated.NAME, "dtype": "float32", "shape": [12], "bytes": 48, "codec": None}]


def test_a_checkpoint_that_is_set_aside_is_shown_if_named_exactly(ckptstore, run):
    run.save("a")
    run.save("b")
    run.catalog.rollback(1)
    assert ckptstore("show", run.url, "b").code == 3
    ended = ckptstore("show", run.url, "b@2")
    assert ended.code == 0
    assert any(line.split() == ["set", "aside", "abandoned"] for line in ended.lines)


@pytest.mark.parametrize("name", ["nobody", "a@7", "b@1"])
@pytest.mark.parametrize("command", ["show", "tree", "verify", "pin", "unpin", "rollback"])
def test_what_is_not_there_exits_with_3_and_names_what_is(ckptstore, run, command, name):
    run.save("a")
    more = {"pin": ["--holder", "x"], "unpin": ["--holder", "x"], "rollback": ["--yes"]}.get(command, [])
    ended = ckptstore(command, run.url, name, *more)
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith("error: ")
    assert "hint: " in ended.err
    ended = ckptstore(command, run.url, name, *more, "--json")
    assert (ended.code, ended.json["error"], ended.err) == (3, "not_found", "")


@pytest.mark.parametrize("name", ["a", "a@1"])
def test_what_is_retired_is_said_to_be_so_and_where_the_reason_stands(ckptstore, run, name):
    for each in "abc":
        run.save(each)
    retire(run.log, [1], reason="too old")
    run.abandon("a")
    ended = ckptstore("show", run.url, name, "--json")
    assert (ended.code, ended.json["error"]) == (3, "not_found")
    assert "retired" in ended.json["message"]
    assert "a@1" in ended.json["message"]
    assert f"`ckptstore log {run.url}`" in ended.json["hint"]
    assert "too old" in ckptstore("log", run.url).out


def test_what_is_retired_and_collected_is_said_to_be_kept_no_longer(ckptstore, run):
    for each in "abc":
        run.save(each)
    retire(run.log, [1], reason="too old")
    for info in list(run.store.list("data/")):
        if "/a." in info.key:
            run.store.delete(info.key)
    run.log.append(lambda _: Collected((1,)))
    slot = "Slot 1 holds no checkpoint that is kept: it was retired and collected, or"
    for name, told in (("a@1", slot), ("a", "There is no committed checkpoint 'a' at")):
        ended = ckptstore("show", run.url, name, "--json")
        assert (ended.code, ended.json["message"][: len(told)]) == (3, told)
        assert f"`ckptstore log {run.url}`" in ended.json["hint"]
    assert "the log ends before slot 6" in ckptstore("show", run.url, "a@6").err


def test_what_never_was_committed_is_said_to_be_so(ckptstore, run):
    run.abandon("half", ranks=2)
    ended = ckptstore("show", run.url, "half", "--json")
    assert (ended.code, ended.json["error"]) == (3, "uncommitted")
    assert "in progress, 2 objects" in ended.json["message"]


@pytest.mark.parametrize("command", ["show", "tree", "verify"])
def test_of_an_empty_run_nothing_is_shown(ckptstore, tmp_path, command):
    ended = ckptstore(command, tmp_path / "absent")
    assert (ended.code, ended.out) == (1, "")
    assert "Nothing is committed" in ended.err


def test_the_tree_sums_keys_and_bytes_by_component(ckptstore, run):
    run.save("a", world_size=3)
    ended = ckptstore("tree", run.url)
    assert [line.split() for line in ended.lines] == [
        ["KEYS", "SIZE", "NAME"],
        ["1", "48", "B", "a@1"],
        ["1", "48", "B", "model"],
        ["1", "48", "B", "weight"],
    ]
    assert ckptstore("tree", run.url, "a", "--depth", "1").lines == ended.lines[:3]
    found = ckptstore("tree", run.url, "--json").json
    (model,) = found["children"]
    assert (found["keys"], found["bytes"], model["name"], model["children"][0]["children"]) == (1, 48, "model", [])
    assert ckptstore("tree", run.url, "--depth", "0").code == 2


def test_a_damaged_manifest_is_refused_by_what_reads_it_and_the_rest_is_shown(ckptstore, run):
    part = run.save("a").commit.parts[0].path
    run.flip(part, 30)
    assert ckptstore("show", run.url).code == 0
    for command in (["show", run.url, "--keys"], ["tree", run.url]):
        ended = ckptstore(*command, "--json")
        assert (ended.code, ended.json["error"]) == (1, "integrity")
        assert part in ended.json["message"]


def test_a_value_is_shown_with_what_it_is_stored_as_and_stands_in_the_tree_by_its_slashes(ckptstore, run):
    attempt = begin(run.log, run.job, checkpoint_id="a", world_size=1)
    layout = lay_out(
        [Chunk(TensorMeta(f"ranks/{rank:05d}/rng", "bytes", (2,)), (0,), (2,), 2, CODEC) for rank in (0, 1)]
    )
    path = attempt.stem.shard_key(0)
    shard = upload_shard(run.store, path, layout, [[b"{}"]] * 2, rank=0, options=TransferOptions())
    commit(run.log, run.job, attempt, [StoredShard(shard, layout.items)])
    rows = ckptstore("show", run.url, "--keys").lines[-2:]
    assert [row.split() for row in rows] == [[CODEC, "2", "2", "B", f"ranks/{rank:05d}/rng"] for rank in (0, 1)]
    assert [each["codec"] for each in ckptstore("show", run.url, "--keys", "--json").json["keys"]] == [CODEC] * 2
    assert [line.split() for line in ckptstore("tree", run.url).lines[2:]] == [
        ["2", "4", "B", "ranks"],
        ["1", "2", "B", "00000"],
        ["1", "2", "B", "00001"],
    ]
