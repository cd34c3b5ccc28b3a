"""Drill 3: bytes of the newest checkpoint are changed, and its size is not."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import MAX_SHARD_BYTES, refused, resumed_from, saved_twice, shard_of

HEADER_AT = 8
"""Before the header of a safetensors file stands its length, in so many bytes; after it the tensors."""


def tampered_bytes(place: Place) -> str:
    """Flip a bit of a tensor: the hash finds it, in a verification and in a load, and the one before is resumed."""
    newest, before, digest = saved_twice(place)
    store, key = place.store(), shard_of(newest, place, 1)
    body = bytearray(store.get(key, max_bytes=MAX_SHARD_BYTES))
    body[HEADER_AT + int.from_bytes(body[:HEADER_AT], "little")] ^= 1  # the first byte of the first tensor
    store.put(key, bytes(body))
    opened = place.opened()
    expect(
        not opened.verify(newest.checkpoint_id, level="full").ok,
        f"A verification of {newest.checkpoint_id} missed the bit that was flipped in {key}.",
    )
    reason = refused(
        "A read of the tensors with the flipped bit",
        lambda: [opened.get(newest.checkpoint_id).read(name) for name in newest.keys if newest.keys[name].shape],
    )
    resumed_from(place, before, digest)
    return f"{newest.checkpoint_id} was refused ({reason}); {before.checkpoint_id} was resumed."
