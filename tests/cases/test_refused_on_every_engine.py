"""A store that does not create once is read like any other; it is written to by nobody, or by one writer's promise."""

import shutil
from pathlib import Path

import pytest
from case_samples import command_here, sharded, unsharded
from places import on
from refusals import COMMANDS, LOADS, SAVES, command, command_told, state, target, told
from states import blank, same
from typer.testing import CliRunner

import storage_writers as sw
from ckptstore.cli.app import app
from ckptstore.errors import UnsupportedError

on_every_refused_store = on("fsspec-files", "obstore-rclone", "s3fs-rclone", "obstore-juicefs", "s3fs-juicefs")
LOST = "both believe that they committed, and one checkpoint would be lost"


def save_shares(root, name, seed):
    """Save as one of several ranks."""
    sw.save(sharded(seed), checkpoint_id=name, storage_writer=sw.CkptStoreWriter(root))


def copy(root, place):
    """Copy a run, file by file, by a client that knows nothing of it."""
    if place.server is None:
        shutil.copytree(root, place.url)
        return
    client, prefix = place.server.client(), place.url.removeprefix(place.server.url(""))
    for path in Path(root).rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(root)}"
            client.put_object(Bucket=place.server.bucket, Key=key, Body=path.read_bytes())


@pytest.fixture
def copied(place, gang, tmp_path):
    """A run that was saved by two ranks elsewhere, and copied to the place."""
    for seed in (1, 2):
        gang.values(2, save_shares, str(tmp_path / "elsewhere"), f"step-{seed}", seed)
    copy(tmp_path / "elsewhere", place)
    return place


@on_every_refused_store
@pytest.mark.parametrize("call", SAVES)
def test_a_save_is_refused_with_what_would_be_lost_and_nothing_is_left(place, call):
    error = told(lambda: SAVES[call](state(), checkpoint_id="a", storage_writer=place.writer()), UnsupportedError, LOST)
    assert "assume_single_writer=True" in error.hint
    assert place.contents() == {}


@on_every_refused_store
def test_a_run_that_was_copied_there_is_read_listed_and_verified_and_stays_as_it_is(copied):
    before = copied.contents()
    for call in LOADS:
        found = blank(unsharded(0))
        LOADS[call](found, storage_reader=copied.reader())
        assert same(found, unsharded(2))
    store = copied.opened()
    assert [each.checkpoint_id for each in store.checkpoints()] == ["step-2", "step-1"]
    assert all(store.verify(each, level="full").ok for each in store.checkpoints())
    for name in COMMANDS:
        words, more = COMMANDS[name][:1], COMMANDS[name][1:]
        assert command(*words, copied.url, *more, *copied.arguments)[0] == 0
    told(lambda: sw.save(state(), checkpoint_id="a", storage_writer=copied.writer()), UnsupportedError, LOST)
    command_told("pin", copied.url, "step-1", "--holder", "x", *copied.arguments, kind=UnsupportedError, names=(LOST,))
    command_told("rollback", copied.url, "step-1", "--yes", *copied.arguments, kind=UnsupportedError, names=(LOST,))
    assert copied.contents() == before


@on_every_refused_store
def test_whoever_promises_to_be_alone_saves_and_resumes_there(place, capsys):
    """I15, as far as it goes: the incarnation is claimed, and nobody is kept out."""
    alone = place.promising()
    for number, call in enumerate([*SAVES, *SAVES]):
        SAVES[call](state() | {"step": number}, checkpoint_id=f"step-{number}", storage_writer=alone.writer())
        found = target()
        sw.load(found, storage_reader=place.reader())
        assert same(found, state() | {"step": number})
    assert [each.checkpoint_id for each in place.opened().checkpoints()] == ["step-3", "step-2", "step-1", "step-0"]
    for level in ("chain", "exists", "etag", "full"):  # also where a service forgets its ETags
        code, found = command_here(capsys, "verify", place.url, "--all", "--level", level, *place.arguments)
        assert (code, found["ok"]) == (0, True)


CHANGES = [
    ("pin", "step-0", "--holder", "x"),
    ("unpin", "step-0", "--holder", "x"),
    ("rollback", "step-0", "--yes"),
    ("restore", "step-1@2"),
]


@on_every_refused_store
def test_every_command_that_changes_something_under_the_promise_says_that_fencing_does_not_hold(place):
    for number in range(2):
        sw.save(state(), checkpoint_id=f"step-{number}", storage_writer=place.promising().writer())
    for name, *more in CHANGES:
        ended = CliRunner().invoke(app, [*place.arguments, name, place.url, *more, "--assume-single-writer"])
        assert ended.exit_code == 0, ended.output
        assert "fencing does not hold" in ended.stderr
        assert "nothing was changed" not in ended.stdout
    assert place.opened().latest().checkpoint_id == "step-1"
