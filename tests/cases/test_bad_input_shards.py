"""A shard or a manifest part that is not what was written, as every face of one process meets it."""

import shutil

import pytest
from refusals import LOADS, command, contents, load, loaded, nothing_written, save, target, told, untouched

from ckptstore import CheckpointStore
from ckptstore.errors import IntegrityError
from ckptstore.objectstore.urls import open_store


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A run of three checkpoints on a file system, to be copied."""
    path = tmp_path_factory.mktemp("whole") / "run"
    for name in "abc":
        save(path, name)
    return path


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.servers)])
def run(request, files, tmp_path):
    if request.param == "file":
        shutil.copytree(files, tmp_path / "run")
        return str(tmp_path / "run")
    url = request.getfixturevalue("s3_url")
    store = open_store(url)
    for key, body in contents(files).items():
        store.put(key, body)
    return url


def flipped(at):
    def flip(body, _):
        position = at if at >= 0 else len(body) + at
        return body[:position] + bytes([body[position] ^ 1]) + body[position + 1 :]

    return flip


# What becomes of the newest checkpoint's shard or part, given its own bytes and those of the one before.
HARM = {
    "shard is gone": ("rank-", lambda *_: None),
    "shard is cut": ("rank-", lambda body, _: body[:-1]),
    "shard is longer": ("rank-", lambda body, _: body + b"\0"),
    "shard is empty": ("rank-", lambda *_: b""),
    "shard has a bit flipped in its length": ("rank-", flipped(0)),
    "shard has a bit flipped in its header": ("rank-", flipped(60)),
    "shard has a bit flipped in its leaf table": ("rank-", flipped(-1)),
    "part is gone": ("part-", lambda *_: None),
    "part is cut": ("part-", lambda body, _: body[:-1]),
    "part is longer": ("part-", lambda body, _: body + b"\0" * 100_000),
    "part is another one": ("part-", lambda _, other: other),
    "part has a bit flipped": ("part-", flipped(50)),
}


SEEN_BY_A_READ = {what for what in HARM if what.startswith("part") or what.endswith(("gone", "cut", "empty", "table"))}
"""One tensor needs the manifest, the leaf table and its leaves."""


def keys_of(run, file):
    found = [info.key for info in open_store(run).list("data/") if info.key.rpartition("/")[2].startswith(file)]
    return {key.split("/")[2].partition(".")[0]: key for key in found}


ON_AN_OBJECT_STORE = ("shard is gone", "shard is longer", "part is cut", "part is another one")


@pytest.mark.parametrize(
    ("run", "what"),
    [("file", what) for what in HARM]
    + [pytest.param("s3", what, marks=pytest.mark.servers) for what in ON_AN_OBJECT_STORE],
    indirect=["run"],
)
def test_harm_to_the_structure_is_found_by_every_face_before_a_target_is_touched(run, what):
    """I4, I13."""
    file, harm = HARM[what]
    keys, store = keys_of(run, file), open_store(run)
    bodies = contents(run)
    body = harm(bodies[keys["c"]], bodies[keys["b"]])
    store.delete(keys["c"]) if body is None else store.put(keys["c"], body)
    with nothing_written(run):
        for call in LOADS:
            into = target()
            error = told(lambda call=call, into=into: load(run, into, call=call), IntegrityError, keys["c"])
            assert untouched(into, values=call == "sw.load")
            assert error.facts["rank"] == 0
        if what in SEEN_BY_A_READ:
            told(lambda: CheckpointStore.open(run).latest().read("model.w"), IntegrityError, keys["c"])
        code, document = command("verify", run, "--level", "full")
        (finding,) = [each for each in document["checkpoints"][0]["findings"] if each["kind"] != "rewritten"]
        assert (code, document["ok"], finding["key"]) == (1, False, keys["c"])
        assert command("show", run)[0] == 0  # the record alone is read
    assert loaded(run, checkpoint_id="b")
    save(run, "d")
    assert loaded(run)


@pytest.mark.parametrize("call", LOADS)
def test_a_bit_flipped_in_a_tensor_is_found_before_the_tensor_is_written_and_verify_first_writes_none(run, call):
    """I13."""
    key = keys_of(run, "rank-")["c"]
    store = open_store(run)
    store.put(key, flipped(100_000)(contents(run)[key], None))
    error = told(lambda: load(run, call=call), IntegrityError, key, "model.w", "leaf")
    assert "written_count" in error.facts
    into = target()
    told(lambda: load(run, into, call=call, verify_first=True), IntegrityError, key, "model.w")
    assert untouched(into, values=call == "sw.load")
    store = CheckpointStore.open(run)
    told(lambda: store.latest().read("model.w"), IntegrityError, key, "model.w")
    assert store.latest().read("model.b").tolist() == list(range(7))  # what is whole can be read
