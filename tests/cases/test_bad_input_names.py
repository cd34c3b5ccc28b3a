"""Names: what can be recorded is taken literally by every face, and the rest is refused before a byte is written."""

import pytest
import torch
from places import ON_SERVERS, on
from refusals import SAVES, command, command_told, contents, load, loaded, nothing_written, save, told

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import InvalidInputError, NotFoundError

ODD = ["a/b", "*", "?", "[12]", "#", "100%", "%2F", "two words", "ñandú", ".", "..", "../../x", "a.t0001.a0001.0"]
ODD += ["a\0b", "new\nline", "😀" * 9, "-", "--all", "a@", "a@b", "~", "CON", "latest.json", "x" * 120]
PATTERNS = ["run1", "run[1]", "run*", "run?", "{run1,run}", "step#5", "a b+c", "p%20q", "p q", "café", "a//b", "a/"]
BAD = ["", "x" * 121, "x" * 600, "ñ" * 21, "a@12", "@0", "\ud800", "a\udcff"]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_a_name_that_can_be_recorded_is_saved_found_loaded_verified_and_listed_as_it_is(tmp_path, name):
    root = tmp_path / "run"
    for number, each in enumerate(("other", name, "another")):
        sw.save({"x": torch.tensor(number)}, checkpoint_id=each, storage_writer=sw.CkptStoreWriter(root))
    store = CheckpointStore.open(root)
    assert [each.checkpoint_id for each in store.checkpoints()] == ["another", name, "other"]
    assert (store.get(name).seq, store.get(f"{name}@2").checkpoint_id) == (2, name)
    assert store.verify(store.get(name), level="full").ok
    for asked in ({"checkpoint_id": name}, {"checkpoint_id": f"{name}@2"}):
        target = {"x": torch.tensor(-1)}
        sw.load(target, storage_reader=sw.CkptStoreReader(root, **asked))
        assert target["x"] == 1
    target = {"x": torch.tensor(-1)}
    sw.load(target, checkpoint_id=name, storage_reader=sw.CkptStoreReader(root))
    assert target["x"] == 1
    assert [each["checkpoint_id"] for each in command("ls", root)[1]["committed"]] == ["another", name, "other"]
    if "\0" not in name:  # which no argument of a process can hold
        code, shown = command("verify", "--level", "full", root, "--", name)
        assert (code, shown["ok"], shown["checkpoints"][0]["checkpoint_id"]) == (0, True, name)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@on("memory", "fsspec-memory", *ON_SERVERS)
def test_such_names_and_those_that_look_like_patterns_can_be_used_on_every_store(place):
    names, writer = [*ODD[:6], *PATTERNS], place.probed().writer()
    for number, name in enumerate(names):
        sw.save({"x": torch.tensor(number)}, checkpoint_id=name, storage_writer=writer)
    store = place.opened()
    assert [each.checkpoint_id for each in store.checkpoints()] == names[::-1]
    for number, name in enumerate(names):
        assert store.verify(store.get(name), level="full").ok
        target = {"x": torch.tensor(-1)}
        sw.load(target, checkpoint_id=name, storage_reader=place.reader())
        assert target["x"] == number
    listed = command("ls", place.url, *place.arguments)[1]["committed"]
    assert [each["checkpoint_id"] for each in listed] == names[::-1]


@pytest.mark.parametrize("call", SAVES)
def test_a_name_that_cannot_be_recorded_is_refused_before_the_run_exists(root, call):
    for name in BAD:
        with nothing_written(root):
            told(lambda name=name: save(root, name, call=call), InvalidInputError, seconds=5)
    assert contents(root) == {}


@pytest.mark.parametrize("name", [5, b"a", ["a"], True, 1.5], ids=repr)
def test_a_name_that_is_no_text_is_refused_by_every_face(tmp_path, name):
    root = tmp_path / "run"
    save(root, "a")
    with nothing_written(root):
        for call in SAVES:
            told(lambda call=call: save(root, name, call=call), InvalidInputError, repr(name))
        told(lambda: sw.CkptStoreReader(root, checkpoint_id=name), InvalidInputError, repr(name))
        reader = sw.CkptStoreReader(root)
        told(lambda: sw.load({}, checkpoint_id=name, storage_reader=reader), InvalidInputError, repr(name))
        told(lambda: CheckpointStore.open(root).get(name), InvalidInputError, repr(name))
    assert loaded(root)


def test_a_save_without_a_name_or_a_step_is_refused_before_the_run_exists(root):
    error = told(lambda: save(root, None), InvalidInputError)
    assert "describe" in error.hint
    assert contents(root) == {}


@pytest.mark.parametrize("asked", ["b", "A", "a ", "a@2", "b@1", "a@99", "step-1"])
def test_a_name_that_is_not_there_is_not_found_and_what_there_is_is_said(tmp_path, asked):
    root = tmp_path / "run"
    save(root, "a")
    with nothing_written(root):
        for work in (
            lambda: load(root, checkpoint_id=asked),
            lambda: load(root, call="dcp.load", checkpoint_id=asked),
            lambda: CheckpointStore.open(root).get(asked),
        ):
            told(work, NotFoundError)
        for name in ("show", "tree", "verify"):
            command_told(name, root, asked, kind=NotFoundError)
        command_told("pin", root, asked, "--holder", "x", kind=NotFoundError)
        command_told("rollback", root, asked, "--yes", kind=NotFoundError)
