"""Bytes that are not what was written are refused: by a load before they reach a tensor, and by the program."""

import gzip
import json
import re

import numpy as np
import pytest
import torch
from case_samples import body_of, command, command_here, loaded_here, save, sharded, unsharded, writer
from states import blank, same

import storage_writers as sw
from ckptstore import CheckpointStore, IntegrityError, NotFoundError
from ckptstore.format.layout import slot_key
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.units import KIB


def with_one_bit_flipped(body):
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


def repacked(body, old, new):
    """Change what is packed in a manifest part, so that nothing of it is wrong but its hash."""
    text = gzip.decompress(body)
    assert old in text
    return gzip.compress(text.replace(old, new, 1), mtime=0)


# What is changed, and to what; `other` is the same object of another step.
CHANGES = {
    "a bit of a shard": ("shard", lambda body, _: with_one_bit_flipped(body)),
    "the shard of another step": ("shard", lambda _, other: other),
    "a shard that is short": ("shard", lambda body, _: body[:-1]),
    "a shard that is long": ("shard", lambda body, _: body + b"\0"),
    "an empty shard": ("shard", lambda *_: b""),
    "no shard": ("shard", lambda *_: None),
    "a character of the manifest": ("part", lambda body, _: repacked(body, b"uneven", b"unevem")),
    "the manifest of another step": ("part", lambda _, other: other),
    "a manifest that is long": ("part", lambda body, _: body + b"\0"),
    "no manifest": ("part", lambda *_: None),
    "a character of the commit": ("record", lambda body, _: body.replace(b'"COMMITTED"', b'"COMMITTEE"')),
    "the commit of another step": ("record", lambda _, other: other),
    "a commit that is short": ("record", lambda body, _: body[:-1]),
}


def save_two(gang, root):
    """Save the same model twice, with other values, and return both checkpoints."""
    for seed in (10, 20):
        gang.values(3, save, root, f"step-{seed}", seed)
    store = CheckpointStore.open(root)
    return store.get("step-10"), store.get("step-20")


def keys_of(checkpoint):
    stem = checkpoint.commit.stem
    return {"shard": stem.shard_key(1), "part": stem.part_key(0), "record": slot_key(checkpoint.seq)}


def change(store, key, body):
    if body is None:
        store.delete(key)
    else:
        store.put(key, body)


def failure_of_load(root, target):
    with pytest.raises((IntegrityError, NotFoundError)) as caught:
        sw.load(target, storage_reader=sw.CkptStoreReader(root))
    return caught.value


def finding_of(said):
    """Return what the program found of one object; before it, the store itself may have called it another one."""
    if "error" in said:
        return said["facts"] | {"message": said["message"]}
    *before, finding = said["log"]["findings"] + said["checkpoints"][0]["findings"]
    assert [(each["kind"], each["key"]) for each in before] in ([], [("rewritten", finding["key"])])
    return finding


def test_every_damage_is_refused_and_the_object_is_named_with_what_was_expected_and_found(gang, root, capsys):
    """I4, I13. An older checkpoint is loaded if somebody asks for it, and never by itself."""
    old, new = save_two(gang, root)
    store = open_store(root)
    for what, (kind, changed) in CHANGES.items():
        key = keys_of(new)[kind]
        body = body_of(store, key)
        assert changed(body, body_of(store, keys_of(old)[kind])) != body
        change(store, key, changed(body, body_of(store, keys_of(old)[kind])))

        target = blank(unsharded(0))
        error = failure_of_load(root, target)
        assert key in str(error), what
        if kind != "record":
            assert f"`ckptstore verify {store.url} step-20@2 --level full --quarantine`" in error.hint, what
        if what == "a bit of a shard":
            assert error.facts["tensor"] == "model.w"
        else:
            assert same(target, blank(unsharded(0))), what
        code, said = command_here(capsys, "verify", root, "--level", "full")
        finding = finding_of(said)
        assert (code, finding["key"]) == (1, key), what
        if not what.startswith("no "):
            assert finding["expected"] != finding["found"], what
            assert str(finding["found"]) in finding["message"], what
        if kind != "record":
            assert same(loaded_here(root, checkpoint_id="step-10"), unsharded(10)), what
            assert command_here(capsys, "verify", root, "step-10", "--level", "full")[0] == 0, what
        store.put(key, body)
    assert same(loaded_here(root), unsharded(20))
    assert command("verify", root, "--all", "--level", "full")["ok"]


def test_the_program_ends_with_one_for_a_damaged_shard_and_says_where(gang, root):
    _, new = save_two(gang, root)
    store, key = open_store(root), keys_of(new)["shard"]
    store.put(key, with_one_bit_flipped(body_of(store, key)))
    said = command("verify", root, "--level", "full", code=1)
    assert finding_of(said)["key"] == key
    assert re.search(r"BLAKE3 [0-9a-f]{64}, written was [0-9a-f]{64}", finding_of(said)["message"])


def load_what_is_damaged(root, verify_first):
    """Try to load, and return what was said and what of the target changed."""
    target, before = blank(sharded(0)), blank(sharded(0))
    try:
        sw.load(target, storage_reader=sw.CkptStoreReader(root, verify_first=verify_first))
    except (IntegrityError, NotFoundError) as error:
        changed = [name for name in before["model"] if not same(target["model"][name], before["model"][name])]
        changed += [name for name in ("plain", "step", "note") if not same(target[name], before[name])]
        return str(error), error.facts["untouched"], changed
    return None


def with_a_flipped_leaf(body):
    """Flip a bit in the middle of the largest item."""
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    start, end = max((each["data_offsets"] for key, each in header.items() if key != "__metadata__"), key=np.diff)
    at = len(body) - max(each["data_offsets"][1] for key, each in header.items() if key != "__metadata__")
    flipped = bytearray(body)
    flipped[at + (start + end) // 2] ^= 1
    return bytes(flipped)


@pytest.mark.parametrize("verify_first", [False, True], ids=["at once", "verify first"])
def test_a_load_that_fails_leaves_every_rank_as_it_was_or_says_that_the_target_is_a_mixture(gang, root, verify_first):
    """Each rank reads its own shard; the one of the last rank is damaged."""
    gang.values(3, save, root, "step-1", 1)
    store, key = open_store(root), CheckpointStore.open(root).latest().commit.stem.shard_key(2)
    body = body_of(store, key)
    for damaged in (with_a_flipped_leaf(body), body[:-1], None):
        change(store, key, damaged)
        ended = gang.values(3, load_what_is_damaged, root, verify_first)
        only_a_leaf = damaged is not None and len(damaged) == len(body)
        if only_a_leaf and not verify_first:
            assert [bool(changed) for _, _, changed in ended][:2] == [True, True]
            assert all("mixture" in message and not untouched for message, untouched, _ in ended)
        else:
            assert [changed for _, _, changed in ended] == [[], [], []]
            assert all("No target was touched" in message and untouched for message, untouched, _ in ended)
        store.put(key, body)


def test_a_load_of_one_process_that_fails_at_its_first_byte_says_that_the_target_is_untouched(root):
    sw.save({"a": torch.ones(100)}, checkpoint_id="a", storage_writer=writer(root))
    store, key = open_store(root), CheckpointStore.open(root).latest().commit.stem.shard_key(0)
    store.put(key, with_a_flipped_leaf(body_of(store, key)))
    target = {"a": torch.zeros(100)}
    error = failure_of_load(root, target)
    assert (error.facts["untouched"], error.facts["written"]) == (True, [])
    assert "mixture" not in str(error)
    assert same(target, {"a": torch.zeros(100)})


def test_eight_tensors_of_which_the_last_is_damaged_are_all_as_they_were_after_verifying_first(root):
    state = {f"t{index}": torch.full((50_000,), float(index)) for index in range(8)}
    sw.save(state, checkpoint_id="a", storage_writer=writer(root))
    store, key = open_store(root), CheckpointStore.open(root).latest().commit.stem.shard_key(0)
    body = bytearray(body_of(store, key))
    body[body.rindex(torch.tensor(7.0).numpy().tobytes())] ^= 1
    store.put(key, bytes(body))
    target = blank(state)
    one_by_one = TransferOptions(fetch_bytes=64 * KIB, fetches_in_flight=1)
    with pytest.raises(IntegrityError, match=r"t7.*mixture") as caught:
        sw.load(target, storage_reader=sw.CkptStoreReader(root, transfer=one_by_one))
    assert not caught.value.facts["untouched"]
    target = blank(state)
    with pytest.raises(IntegrityError, match=r"t7.*No target was touched"):
        sw.load(target, storage_reader=sw.CkptStoreReader(root, verify_first=True))
    assert same(target, blank(state))
