"""A log that is damaged, or newer than this release: nobody answers from it, and nobody writes to it.

And hints that lie: nobody believes them.
"""

import json
import shutil

import pytest
from blake3 import blake3
from protocol.run_samples import append_raw, sealed
from refusals import COMMANDS, command, command_told, contents, load, loaded, refused_by_all_faces, save, told

from ckptstore import CheckpointStore
from ckptstore.errors import IntegrityError, UnsupportedError
from ckptstore.format.layout import slot_key, state_key
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol import reading
from ckptstore.protocol.log import RunLog

LATER = {
    "kind": {"kind": "MERGE"},
    "kind, optional in a wrong way": {"kind": "MERGE", "optional": "true"},
    "format": {"kind": "PIN", "format": 2, "target": 1, "holder": "x", "reason": ""},
    "a commit that borrows": {"kind": "COMMIT", "borrows": [1]},
}
ALL_BUT_LOG = tuple(name for name in COMMANDS if name != "log")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A run of three checkpoints on a file system, to be copied."""
    path = tmp_path_factory.mktemp("whole") / "run"
    for name in "abc":
        save(path, name)
    return path


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.servers)])
def run(request, files, tmp_path):
    """A run of three checkpoints: slot 0 holds the claim, slots 1 to 3 the commits of a, b and c."""
    if request.param == "file":
        shutil.copytree(files, tmp_path / "run")
        return str(tmp_path / "run")
    url = request.getfixturevalue("s3_url")
    store = open_store(url)
    for key, body in contents(files).items():
        store.put(key, body)
    return url


def body_of(url, key):
    return open_store(url).get(key, max_bytes=1 << 20)


def put(url, key, body):
    open_store(url).put(key, body)


@pytest.mark.parametrize("what", LATER)
def test_a_record_of_a_later_release_stops_answers_and_writers_and_says_what_to_install(run, what):
    append_raw(open_store(run), **LATER[what])
    refused_by_all_faces(run, UnsupportedError, slot_key(4), LATER[what]["kind"], commands=ALL_BUT_LOG)
    assert "pip install" in told(lambda: load(run), UnsupportedError).hint
    document = command_told("log", run, kind=UnsupportedError, names=(slot_key(4),))
    assert [each["seq"] for each in document["records"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("fields", [{"kind": "AUDIT"}, {"kind": "PIN", "format": 2}], ids=["kind", "format"])
def test_an_optional_record_of_a_later_release_is_passed_over_by_every_face(run, fields):
    append_raw(open_store(run), optional=True, text="hello", **fields)
    assert CheckpointStore.open(run).latest().seq == 3
    assert loaded(run)
    save(run, "d")
    assert CheckpointStore.open(run).latest().checkpoint_id == "d"
    for name, arguments in COMMANDS.items():
        assert command(name, run, *arguments[1:])[0] == 0
    assert command("log", run)[1]["records"][4]["record"]["text"] == "hello"


@pytest.mark.parametrize("has_log", [False, True], ids=["no log yet", "a log"])
def test_a_run_of_a_later_release_is_refused_by_every_face(run, has_log):
    store = open_store(run)
    body = json.dumps({**json.loads(body_of(run, "run.json")), "format": 2}).encode()
    first = json.loads(body_of(run, slot_key(0)))
    for info in [*store.list("log/"), *store.list("data/")]:
        store.delete(info.key)
    put(run, "run.json", body)
    if has_log:
        put(run, slot_key(0), sealed({**first, "prev": blake3(body).hexdigest(), "format": 2}))
    refused_by_all_faces(run, UnsupportedError, "format 2", commands=tuple(COMMANDS))


def altered(body):
    value = json.loads(body)
    return sealed({**value, "written_at": "2026-01-01T00:00:00.000Z"})


HARM = {
    "cut": lambda body: body[: len(body) // 2],
    "empty": lambda _: b"",
    "flipped": lambda body: body[:40] + bytes([body[40] ^ 1]) + body[41:],
    "not UTF-8": lambda body: b"\xff" * len(body),
    "huge": lambda _: b" " * 100_000,
    "another valid record": altered,
}


@pytest.mark.parametrize(
    ("seq", "harm"),
    [(seq, harm) for seq in (0, 2, 3) for harm in HARM if (seq, harm) != (3, "another valid record")],
)
def test_a_record_that_is_not_what_was_written_is_refused_by_every_face(files, tmp_path, seq, harm):
    """I1, I13. A valid record in the place of another one is found by the next one's link; the newest has none yet."""
    run = tmp_path / "run"
    shutil.copytree(files, run)
    key = slot_key(seq)
    (run / key).write_bytes(HARM[harm]((run / key).read_bytes()))
    named = slot_key(seq + 1) if harm == "another valid record" else key
    refused_by_all_faces(run, IntegrityError, named, commands=tuple(COMMANDS))
    readable = seq + (harm == "another valid record")
    assert [each["seq"] for each in command("log", run)[1]["records"]] == list(range(readable))


def nested(depth):
    return "[" * depth + "]" * depth


def inside(depth):
    return '{"x":' + nested(depth) + "}"


# What no release of this format writes, in a record whose seal and links are right: fields of the commit, as JSON.
IMPOSSIBLE = {
    "nested 65 deep": ("training_state", inside(63)),
    "nested 500 deep": ("training_state", inside(498)),
    "nested 20,000 deep": ("training_state", inside(19_998)),
    "a deep list for a number": ("global_step", nested(800)),
    "half a letter": ("training_state", r'{"x":"\ud800"}'),
    "half a letter in a key": ("training_state", r'{"\udfff":1}'),
    "half a letter in a tag": ("tags", r'["\ud800"]'),
    "a number of 1,001 digits": ("training_state", '{"x":1' + "0" * 1000 + "}"),
    "a part of 2^63 - 1 bytes": ("parts", lambda parts: [{**parts[0], "size": 2**63 - 1}]),
    "a part of 10^12 bytes": ("parts", lambda parts: [{**parts[0], "size": 10**12}]),
    "a part that holds 10^12 bytes": ("parts", lambda parts: [{**parts[0], "inflated": 10**12}]),
}


def with_field(body, name, text):
    """Return the record with one field spelled as `text`, which Python need not be able to write."""
    value = json.loads(body)
    spelled = json.dumps(text(value[name])) if callable(text) else text
    value[name] = "HERE"
    head = sealed(value).rpartition(b',"self":')[0].replace(b'"HERE"', spelled.encode())
    return head + b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n'


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_sealed_record_that_no_release_writes_is_damage_for_every_face(files, tmp_path, what):
    """It must not be folded: the hash of the fold, at the next multiple of 64, could never be made."""
    run = tmp_path / "run"
    shutil.copytree(files, run)
    key = slot_key(3)
    (run / key).write_bytes(with_field((run / key).read_bytes(), *IMPOSSIBLE[what]))
    refused_by_all_faces(run, IntegrityError, key, commands=tuple(COMMANDS))


def test_what_is_nested_as_deep_as_is_allowed_is_read_and_folded(files, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(files, run)
    path = run / slot_key(3)
    path.write_bytes(with_field(path.read_bytes(), "training_state", inside(62)))
    fold = RunLog.open(open_store(run)).fold
    assert nested(62).encode() in fold.encode()
    assert CheckpointStore.open(run).latest().seq == 3


@pytest.mark.parametrize("harm", ["cut", "empty", "not UTF-8", "huge", "another run's"])
def test_a_run_json_that_is_not_what_was_written_is_refused_by_every_face(files, tmp_path, harm):
    run = tmp_path / "run"
    shutil.copytree(files, run)
    body = (run / "run.json").read_bytes()
    other = json.dumps({**json.loads(body), "run": "f" * 32}).encode()
    (run / "run.json").write_bytes(other if harm == "another run's" else HARM[harm](body))
    named = slot_key(0) if harm == "another run's" else "run.json"
    refused_by_all_faces(run, IntegrityError, named, commands=tuple(COMMANDS))


@pytest.mark.parametrize("seq", [0, 2], ids=["first", "middle"])
def test_a_hole_is_damage_for_every_face_and_nobody_writes_into_it(run, seq, monkeypatch):
    """I2."""
    monkeypatch.setattr(reading, "HOLE_PAUSE_SECONDS", 0.01)
    open_store(run).delete(slot_key(seq))
    refused_by_all_faces(run, IntegrityError, slot_key(seq), "hole", commands=tuple(COMMANDS))


def test_a_newest_record_that_is_gone_is_said_loudly_and_the_one_before_is_the_latest(run):
    open_store(run).delete(slot_key(3))
    store = CheckpointStore.open(run)
    assert (store.latest().checkpoint_id, store.lost_from) == ("b", 3)
    code, document = command("verify", run)
    assert (code, document["ok"]) == (1, False)
    assert load(run) is not None


LATEST = {
    "gone": None,
    "empty": b"",
    "not UTF-8": b"\xff\xfe\x00",
    "cut": b'{"seq":3',
    "huge": b"[" * 5_000_000,
    "deep": b"[" * 10_000,
    "a list": b"[1,2]",
    "a negative slot": {"seq": -1},
    "text for a slot": {"seq": "3"},
    "a slot of 5,000 digits": b'{"seq":' + b"9" * 5000 + b"}",
    "an older slot": {"seq": 1},
    "a slot of the future": {"seq": 10**9},
    "another name": {"checkpoint_id": "nobody", "record_blake3": "0" * 64},
    "the claim's slot": {"seq": 0},
}


@pytest.mark.parametrize("what", LATEST)
def test_whatever_latest_json_says_the_answers_are_the_same(files, tmp_path, what):
    """I10."""
    run = tmp_path / "run"
    shutil.copytree(files, run)
    said = LATEST[what]
    hint = run / "latest.json"
    if said is None:
        hint.unlink()
    else:
        hint.write_bytes(
            said if isinstance(said, bytes) else json.dumps({**json.loads(hint.read_bytes()), **said}).encode()
        )
    assert CheckpointStore.open(run).latest().checkpoint_id == "c"
    assert loaded(run)
    assert command("latest", run)[1]["checkpoint"]["checkpoint_id"] == "c"
    save(run, "d")
    assert [each.checkpoint_id for each in CheckpointStore.open(run).checkpoints()] == ["d", "c", "b", "a"]
    assert json.loads(hint.read_bytes())["checkpoint_id"] == "d"


def test_whatever_stands_under_state_the_answers_are_the_same(files, tmp_path):
    """I10: it counts only with the hash that the record in its slot carries."""
    run = tmp_path / "run"
    shutil.copytree(files, run)
    store = CheckpointStore.open(run)
    for number in range(130):
        store.pin(store.get("a"), holder=f"job-{number}")
    true = contents(run)
    assert {state_key(64), state_key(128)} <= true.keys()
    lie = json.loads(true[state_key(128)])
    lie["commits"] = []
    for body in (None, b"", b"\xff" * 100, b"{" * 5_000_000, json.dumps(lie).encode(), true[state_key(64)]):
        for seq in (64, 128):
            path = run / state_key(seq)
            path.unlink(missing_ok=True) if body is None else path.write_bytes(body)
        found = CheckpointStore.open(run)
        assert [each.checkpoint_id for each in found.checkpoints()] == ["c", "b", "a"]
        assert len(found.get("a").committed.pins) == 130
        assert found.verify(level="chain").ok
        assert loaded(run)
