"""One flipped bit, anywhere: the program finds it, a load refuses it, and no tensor ever holds it."""

import json
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from case_samples import body_of, command, command_here, loaded_here, save, unsharded
from states import bits, blank, same

import storage_writers as sw
from ckptstore import CheckpointStore, IntegrityError
from ckptstore.format.layout import state_key
from ckptstore.format.shard import LEAF_TABLE_NAME, leaf_bytes_of
from ckptstore.objectstore.urls import open_store

BLANK = 0xA5
SAVED = 7


@dataclass(frozen=True)
class Region:
    """Bytes of an object that are of one kind; of an item also what it is called."""

    kind: str
    key: str
    start: int
    end: int
    item: str = ""


@dataclass(frozen=True)
class Flip:
    seed: int
    region: Region
    position: int
    bit: int


def regions_of_shard(key, body):
    length = int.from_bytes(body[:8], "little")
    text = body[8 : 8 + length]
    header = json.loads(text)
    header.pop("__metadata__")
    yield Region("length", key, 0, 8)
    yield Region("header", key, 8, 8 + len(text.rstrip()))
    if len(text.rstrip()) < len(text):
        yield Region("padding", key, 8 + len(text.rstrip()), 8 + length)
    for name, entry in header.items():
        start, end = (8 + length + each for each in entry["data_offsets"])
        if start < end:
            kind = {LEAF_TABLE_NAME: "leaf table", "step": "value", "note": "value"}.get(name, "tensor")
            yield Region(kind, key, start, end, name)


def regions_of_run(root):
    """Return everything that a run consists of but its hints, by kind."""
    store = open_store(root)
    found = []
    for info in store.list(""):
        body = body_of(store, info.key)
        if info.key.endswith(".safetensors"):
            found += regions_of_shard(info.key, body)
        elif info.key.endswith(".gz"):
            found.append(Region("part", info.key, 0, len(body)))
        elif info.key.startswith("log/"):
            found.append(Region("record", info.key, 0, len(body)))
        elif info.key == "run.json":
            found.append(Region("run.json", info.key, 0, len(body)))
    by_kind = {}
    for region in found:
        by_kind.setdefault(region.kind, []).append(region)
    return by_kind


def flips(by_kind, for_each_kind):
    """Return so many flips of every kind, each from a seed of its own."""
    for number, (_, regions) in enumerate(sorted(by_kind.items())):
        for seed in range(1000 * number, 1000 * number + for_each_kind):
            chance = random.Random(seed)  # noqa: S311  (to be repeated, not to be secret)
            region = chance.choice(regions)
            yield Flip(seed, region, chance.randrange(region.start, region.end), chance.randrange(8))


class Flipped:
    """The run while one bit of it is flipped."""

    def __init__(self, root, flip):
        self.store, self.key = open_store(root), flip.region.key
        self.body = body_of(self.store, self.key)
        self.changed = bytearray(self.body)
        self.changed[flip.position] ^= 1 << flip.bit

    def __enter__(self):
        self.store.put(self.key, bytes(self.changed))

    def __exit__(self, *_):
        self.store.put(self.key, self.body)


def refused(root, flip):
    """Load; return what is wrong about how the load treated the flip, or None."""
    target, untouched = blank(unsharded(0)), blank(unsharded(0))
    try:
        sw.load(target, storage_reader=sw.CkptStoreReader(root))
    except IntegrityError:
        pass
    else:
        return "was loaded"
    if flip.region.kind != "tensor":
        return None if same(target, untouched) else "touched the target"
    return None if only_blank_or_right(target, flip) else "reached a tensor"


def tensors_in(state):
    return {f"model.{name}": tensor for name, tensor in state["model"].items()} | {"plain": state["plain"]}


def only_blank_or_right(target, flip):
    """Say whether the damaged leaf was left out, and all the rest is what was saved or what was there before."""
    item, _, offsets = flip.region.item.partition("@")
    loaded = tensors_in(target)
    for name, saved in tensors_in(unsharded(SAVED)).items():
        found, right = (np.frombuffer(bits(tensor), np.uint8) for tensor in (loaded[name], saved))
        if not ((found == right) | (found == BLANK)).all():
            return False
        if item == name:
            first_row = int(offsets.split(",")[0] or 0)
            leaf_bytes = leaf_bytes_of(flip.region.end - flip.region.start)
            leaf = (flip.position - flip.region.start) // leaf_bytes * leaf_bytes
            start = first_row * saved[0].nbytes + leaf
            end = start + min(leaf_bytes, flip.region.end - flip.region.start - leaf)
            if (found[start:end] != BLANK).any():
                return False
    return True


def check_flips(root, capsys, for_each_kind, by_command):
    by_kind = regions_of_run(root)
    assert sorted(by_kind) == sorted(
        ["length", "header", "padding", "tensor", "value", "leaf table", "part", "record", "run.json"]
    )
    faults, seen = [], Counter()
    for flip in flips(by_kind, for_each_kind):
        with Flipped(root, flip):
            code, _ = command_here(capsys, "verify", root, "--level", "full")
            fault = refused(root, flip) if code == 1 else f"verify ended with {code}"
            if seen[flip.region.kind] < by_command:
                command("verify", root, "--level", "full", code=1)
        faults += [(fault, flip)] if fault else []
        seen[flip.region.kind] += 1
    assert faults == []
    assert same(loaded_here(root), unsharded(SAVED))
    assert command_here(capsys, "verify", root, "--level", "full")[0] == 0
    return seen.total()


def test_every_one_of_hundreds_of_flips_is_found_and_refused(gang, tmp_path, capsys):
    """I13."""
    root = str(tmp_path / "run")
    gang.values(3, save, root, "step-7", SAVED)
    assert check_flips(root, capsys, for_each_kind=40, by_command=1) == 360


@pytest.mark.servers
def test_flips_on_a_real_object_store_are_found_and_refused(gang, s3_url, capsys):
    """I13."""
    gang.values(3, save, s3_url, "step-7", SAVED)
    assert check_flips(s3_url, capsys, for_each_kind=5, by_command=0) == 45


def test_a_flip_in_a_tensor_that_is_not_asked_for_changes_nothing(gang, tmp_path):
    root = str(tmp_path / "run")
    gang.values(3, save, root, "step-7", SAVED)
    others = [region for region in regions_of_run(root)["tensor"] if region.item.partition("@")[0] != "model.w"]
    wanted = {"model": {"w": unsharded(SAVED)["model"]["w"]}}
    for flip in flips({"tensor": others}, 20):
        with Flipped(root, flip):
            target = blank(wanted)
            sw.load(target, storage_reader=sw.CkptStoreReader(root, only=("model.w",)))
            assert same(target, wanted), flip


# Hints


def answers(root, capsys):
    """Return all that a run answers."""
    store = CheckpointStore.open(root)
    verified, said = command_here(capsys, "verify", root, "--level", "full")
    return [
        store.latest().seq,
        [(each.seq, each.commit, each.committed.pins) for each in store.checkpoints()],
        [entry.blake3 for entry in store.records()],
        store.uncommitted(),
        store.lost_from,
        (verified, said["ok"], said["log"]),
        command_here(capsys, "ls", root),
        command_here(capsys, "latest", root),
        same(loaded_here(root), unsharded(SAVED)),
    ]


def test_a_flip_in_a_hint_changes_no_answer(gang, root, capsys):
    """I10."""
    gang.values(3, save, root, "step-7", SAVED)
    store = CheckpointStore.open(root)
    for number in range(66):  # so that the log is long enough to be remembered in a hint
        store.pin(store.latest(), holder=f"reader-{number % 3}", reason=str(number))
    hints = ["latest.json", store.latest().commit.stem.committed_key, state_key(64)]
    sizes = {key: open_store(root).head(key).size for key in hints}
    before = answers(root, capsys)
    assert (before[4], before[5][0], before[8]) == (None, 0, True)
    regions = {key: [Region("hint", key, 0, size)] for key, size in sizes.items()}
    for flip in flips(regions, 3 if root.startswith("s3://") else 12):
        with Flipped(root, flip):
            assert answers(root, capsys) == before, flip
    for key in hints:
        open_store(root).delete(key)
    assert answers(root, capsys) == before
