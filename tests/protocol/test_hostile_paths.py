"""Whatever path a forged record, part or snapshot names: nothing outside of the commit's own attempt is asked for."""

from __future__ import annotations

import gzip
import json

import pytest
from blake3 import blake3
from run_samples import a_run, body_of, sealed

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptStoreError, IntegrityError
from ckptstore.format.codec import deflate
from ckptstore.format.layout import slot_key, state_key
from ckptstore.format.records import FOLD_EVERY
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import TransferOptions
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.log import RunLog
from ckptstore.testing.simulated import ManualClock
from ckptstore.testing.tapped import TappedStore

KINDS = {"part": "part-00000.json.gz", "shard": "rank-00000.safetensors", "documents": "fingerprints.json.gz"}


def hostile(right, other):
    """Return paths by what is wrong with them; `right` is what stands there, `other` the same of another attempt."""
    folder, _, name = right.rpartition("/")
    stem = folder.rpartition("/")[2]
    return {
        "parent": f"../{right}",
        "parent inside": f"{folder}/../{stem}/{name}",
        "parent at the end": f"{folder}/..",
        "dot": f"./{right}",
        "dot inside": f"{folder}/./{name}",
        "absolute": f"/{right}",
        "root": "/etc/passwd",
        "home": "~/.aws/credentials",
        "double slash": right.replace("/", "//", 1),
        "trailing slash": f"{right}/",
        "encoded slash": right.replace("/", "%2F"),
        "encoded dots": f"%2e%2e/{right}",
        "encoded twice": f"{folder}/%252e%252e/{name}",
        "encoded letter": right.replace("data", "d%61ta"),
        "lower-case escape": right.replace("step", "%c3%b1"),
        "backslash": right.replace("/", "\\"),
        "backslash parent": f"{folder}/..\\{name}",
        "null": f"{right}\x00",
        "null inside": f"{folder}/\x00/{name}",
        "newline": f"{right}\n",
        "decomposed": f"{folder}e\u0301/{name}",
        "full-width dots": f"\uff0e\uff0e/{right}",
        "full-width slash": right.replace("/", "\uff0f"),
        "Arabic digits": right.replace("00000", "\u0660" * 5),
        "upper case": right.upper(),
        "url": f"https://example.org/{right}",
        "bucket": f"s3://other/{right}",
        "host": f"//example.org/{right}",
        "query": f"{right}?versionId=1",
        "fragment": f"{right}#1",
        "wildcard": right.replace(name, "*"),
        "drive": f"C:{right}",
        "stream": f"{right}:stream",
        "very long": f"data/0/{'x' * 200_00}/{name}",
        "long number": right.replace("00000", "0" * 5000),
        "empty": "",
        "no text": 7,
        "other attempt": other,
        "other lane": right.replace("data/0/", "data/1/"),
        "a record": slot_key(0),
        "run.json": "run.json",
        "trace": f"{folder}/trace.json",
        "copy of the record": f"{folder}/COMMITTED",
        "other kind": f"{folder}/{KINDS['part'] if 'rank' in name else KINDS['shard']}",
    }


NAMES = sorted(hostile("data/0/step.t0001.a0001.0/rank-00000.safetensors", ""))


class Watched:
    """A run of two saves, of which the newest is forged, and the keys that were asked for since."""

    def __init__(self):
        self.store, self.job = a_run(2)
        self.keys: list[str] = []
        self.key = slot_key(2)
        self.commit = json.loads(body_of(self.store, self.key))
        self.other = json.loads(body_of(self.store, slot_key(1)))

    def path(self, place):
        if place == "documents":
            return f"data/0/{self.commit['prefix']}/{KINDS['documents']}"
        if place == "shard":
            return self.part()["shards"][0]["path"]
        return self.commit["parts"][0]["path"]

    def part(self):
        return json.loads(gzip.decompress(body_of(self.store, self.commit["parts"][0]["path"])))

    def forge(self, place, path):
        """Let the newest commit, or what it names, name `path`, with every hash right."""
        commit, ref = self.commit, self.commit["parts"][0]
        if place == "part":
            ref["path"] = path
        elif place == "documents":
            commit["documents"] = {**ref, "path": path, "ranks": [0, 0]}
        elif place == "shard":
            part = self.part()
            part["shards"][0]["path"] = path
            self._put_object(ref, part)
        else:  # a part that a root part names
            self._put_object(ref, {"format": 1, "kind": "root", "parts": [{**ref, "path": path}]})
            ref["root"] = True
        self.store.put(self.key, sealed(commit))

    def _put_object(self, ref, value):
        text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        body = deflate(text)
        self.store.put(ref["path"], body)
        ref |= {"size": len(body), "blake3": blake3(body).hexdigest(), "inflated": len(text)}

    def tapped(self):
        def tap(call, act):
            self.keys.append(call.key)
            return act()

        return TappedStore(self.store, tap)

    def load(self):
        """Open the run and read all that the newest checkpoint names."""
        log = RunLog.open(self.tapped(), clock=ManualClock())
        checkpoint = Checkpoint(log, Catalog(log).latest(), TransferOptions())
        checkpoint.documents()
        for key in checkpoint.keys:
            checkpoint.read(key)
        checkpoint.trace()


def allowed(key, prefix):
    return key in ("run.json", "latest.json") or key.startswith(("log/", "state/")) or f"/{prefix}/" in key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["part", "part of a root", "shard", "documents"])
def test_a_path_that_is_not_the_attempts_own_is_damage_and_never_asked_for(place, name):
    run = Watched()
    right = run.path(place)
    path = hostile(right, right.replace(run.commit["prefix"], run.other["prefix"]))[name]
    run.forge(place, path)
    with pytest.raises(IntegrityError) as caught:
        run.load()
    assert len(str(caught.value)) < 2000
    assert [key for key in run.keys if not allowed(key, run.commit["prefix"])] == []


@pytest.mark.parametrize("place", ["part", "part of a root", "shard"])
def test_the_right_path_is_loaded(place):
    run = Watched()
    run.forge(place, run.path(place))
    if place == "part of a root":  # which cannot be the part that it lists
        with pytest.raises(IntegrityError):
            run.load()
    else:
        run.load()
        assert any("/rank-00000" in key for key in run.keys)


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_that_names_no_attempt_is_damage(name):
    run = Watched()
    run.commit["prefix"] = hostile(run.commit["prefix"] + "/x", run.other["prefix"])[name]
    run.store.put(run.key, sealed(run.commit))
    with pytest.raises(IntegrityError):
        run.load()
    assert [key for key in run.keys if key.startswith("data/")] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_that_names_other_paths_is_passed_over(name):
    """Its hash stands in the record, which somebody forged too: what it says is checked all the same (I10)."""
    store, job = a_run(2)
    for number in range(FOLD_EVERY):
        job.catalog.pin(1, holder=f"h{number}", reason="")
    state = json.loads(body_of(store, state_key(FOLD_EVERY)))
    ref = state["commits"][1]["commit"]["parts"][0]
    ref["path"] = hostile(ref["path"], state["commits"][0]["commit"]["parts"][0]["path"])[name]
    forged = json.dumps(state, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    store.put(state_key(FOLD_EVERY), forged)
    record = json.loads(body_of(store, slot_key(FOLD_EVERY)))
    record["fold"] = blake3(forged).hexdigest()
    store.put(slot_key(FOLD_EVERY), sealed(record))
    with pytest.raises(CkptStoreError):  # without the snapshot, the record says another fold than the slots do
        Catalog(RunLog.open(store, clock=ManualClock())).latest()


@pytest.mark.parametrize(
    "key",
    [
        "log/0.json",
        "log/000000000000.json.json",
        "log/../log/000000000009.json",
        "log/" + "9" * 19 + ".json",
        "log/" + "9" * 30 + ".json",
        "log/" + "0" * 4400 + "7.json",
        "log/\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660.json",
        "log/-00000000001.json",
        "log/sub/000000000009.json",
    ],
    ids=lambda key: ascii(key)[:40],
)
def test_a_foreign_key_in_the_log_is_no_slot(key):
    store, _ = a_run(2)
    bodies = {info.key: body_of(store, info.key) for info in store.list("")}
    other = Listing({**bodies, key: b"x"})
    assert Catalog(RunLog.open(other, clock=ManualClock())).latest().commit.checkpoint_id == "step-2"


class Listing(MemoryStore):
    """A store whose listing holds keys that this library would not write."""

    def __init__(self, bodies):
        super().__init__()
        self._foreign = {key: body for key, body in bodies.items() if ".." in key}
        for key, body in bodies.items():
            if key not in self._foreign:
                self.put(key, body)

    def list(self, prefix, *, after=None):
        found = [*super().list(prefix, after=after)]
        foreign = [type(found[0])(key, 1, None, None) for key in self._foreign if found and key.startswith(prefix)]
        return iter(sorted([*found, *foreign], key=lambda info: info.key))
