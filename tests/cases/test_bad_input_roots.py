"""A root that names no run, and a root where something else stands: nothing is sent, made or changed."""

import contextlib
import os
from pathlib import Path

import pytest
from refusals import COMMANDS, SAVES, command_told, contents, load, refused_by_all_faces, save, told

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import AccessDeniedError, IntegrityError, InvalidInputError, UnsupportedError
from ckptstore.format.layout import slot_key
from ckptstore.objectstore.urls import open_store

NO_ROOTS = ["nope://x", "gs:/x", "s3:/bucket/x", "s3://", "s3://a b/x", "file://relative", "memory://", "", "a//b"]
NO_ROOTS += ["/x/../y", "/x\0", "/x\ny", "/\ud800"]


@pytest.mark.parametrize("root", NO_ROOTS)
def test_what_is_no_root_is_refused_by_every_face_and_says_what_one_looks_like(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for face in (sw.CkptStoreWriter, sw.CkptStoreReader, CheckpointStore.open):
        error = told(lambda face=face: face(root), InvalidInputError, seconds=5)
        assert "://" in error.hint
    if "\ud800" not in root:  # which no argument of a process can hold
        for name in COMMANDS:
            command_told(COMMANDS[name][0], root, kind=InvalidInputError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", [None, 5, b"/x/y", ["/x/y"]])
def test_a_root_of_a_wrong_type_is_refused_when_it_is_given(root):
    for face in (sw.CkptStoreWriter, sw.CkptStoreReader, CheckpointStore.open):
        told(lambda face=face: face(root), InvalidInputError, repr(root))


def test_the_unknown_scheme_is_named_with_those_that_are_known():
    error = told(lambda: sw.CkptStoreWriter("nope://x"), InvalidInputError, "nope")
    assert error.facts["scheme"] == "nope"
    assert all(scheme in error.hint for scheme in ("file://", "s3://", "memory://"))


@pytest.mark.parametrize("below", ["", "/run", "/a/run"])
def test_a_root_that_is_a_file_or_lies_below_one_is_refused_and_the_file_stays(tmp_path, below):
    (tmp_path / "file").write_text("hello")
    root = f"{tmp_path}/file{below}"
    for face in (sw.CkptStoreWriter, sw.CkptStoreReader, CheckpointStore.open):
        told(lambda face=face: face(root), InvalidInputError, root)
    for name in COMMANDS:
        command_told(COMMANDS[name][0], root, kind=InvalidInputError, names=(root,))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "hello")]


@pytest.mark.parametrize("obstacle", ["directory", "link to nothing", "pipe"])
def test_what_is_no_file_in_the_newest_slot_is_never_the_logs_end(tmp_path, obstacle):
    """I2: the answer would be the checkpoint before, as if the newest one had never been."""
    root = tmp_path / "run"
    for name in "ab":
        save(root, name)
    slot = root / slot_key(2)
    slot.unlink()
    if obstacle == "directory":
        slot.mkdir()
    elif obstacle == "pipe":
        os.mkfifo(slot)
    else:
        slot.symlink_to(tmp_path / "nothing")
    refused_by_all_faces(root, IntegrityError, slot_key(2), commands=tuple(COMMANDS))


@pytest.mark.parametrize("call", SAVES)
@pytest.mark.parametrize("obstacle", ["run.json", "log", "data", "log/000000000002.json"])
def test_what_stands_where_the_next_object_goes_ends_the_save_at_once_and_is_named(tmp_path, call, obstacle):
    """A directory where a file goes, a file where a directory goes: no object, so it cannot be read back either."""
    root = tmp_path / "run"
    root.mkdir()
    if obstacle.startswith("log/"):
        save(root, "a")
    before = contents(root)
    with contextlib.suppress(FileExistsError):
        (root / obstacle).mkdir() if obstacle.endswith(".json") else (root / obstacle).write_text("x")
    kind = IntegrityError if obstacle.endswith(".json") else UnsupportedError  # met by who reads, or by who writes
    error = told(lambda: save(root, "b", call=call), kind, obstacle, seconds=10)
    assert obstacle.split("/")[0] in error.hint
    after = contents(root)
    assert {key: after[key] for key in before} == before
    assert not [key for key in after if key.startswith("log/") and key not in before] or obstacle == "data"
    assert "latest.json" not in after or obstacle.startswith("log/")


def test_a_root_that_may_not_be_read_is_no_fresh_run(tmp_path, monkeypatch):
    """The rights are taken away below the port, because the tests may run as root."""
    save(tmp_path / "run", "a")
    real = os.open

    def refuse(path, *rest, **more):
        if Path(os.fsdecode(path)).name == "run.json":
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    for work in (lambda: load(tmp_path / "run"), lambda: save(tmp_path / "run", "b")):
        told(work, AccessDeniedError, "run.json")


def test_a_run_whose_run_json_is_gone_is_no_fresh_run(root):
    save(root, "a")
    open_store(root).delete("run.json")
    refused_by_all_faces(root, IntegrityError, "run.json", commands=tuple(COMMANDS))
