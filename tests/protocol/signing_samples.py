"""Keys for tests, and what somebody may do who can write to the bucket and has none."""

from __future__ import annotations

import json

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from run_samples import Job, body_of, next_record, sealed

from ckptstore.format.layout import slot_key
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions
from ckptstore.signing import Signing
from ckptstore.testing.simulated import ManualClock


def key_of(digit):
    return digit.to_bytes(32, "big")


def public_of(key):
    return Ed25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()


TRAINER, OPERATOR, STRANGER = key_of(1), key_of(2), key_of(3)
TRUSTED = public_of(TRAINER), public_of(OPERATOR)


def signs(key, *, trusted=(), signed_from=0):
    return LogOptions(signing=Signing(key=key, trusted=trusted, signed_from=signed_from))


REQUIRED = LogOptions(signing=Signing(trusted=TRUSTED))


def a_signed_run(saves=3, key=TRAINER):
    """Return a store with a signed run of so many saves, and its job."""
    job = Job(MemoryStore(clock=ManualClock()), options=signs(key, trusted=TRUSTED if key != STRANGER else ()))
    for number in range(1, saves + 1):
        job.save(f"step-{number}", step=number, seed=number)
    return job.store, job


def slots(store):
    return sorted(info.key for info in store.list("log/"))


def forge_commit(store, source=-1):
    """Append a valid commit that nobody signed: that of another slot under another attempt."""
    old = json.loads(body_of(store, slots(store)[source]))
    fields = {
        name: value
        for name, value in old.items()
        if name not in ("run", "seq", "writer", "prev", "self", "signature", "signed_by", "fold")
    }
    prefix = old["prefix"].replace(f".a{old['attempt']:04d}.", ".a0099.")
    fields |= {"attempt": 99, "prefix": prefix, "global_step": 99}
    text = json.dumps({"parts": old["parts"], "documents": old["documents"]}).replace(old["prefix"], prefix)
    key, body = next_record(store, **{**fields, **json.loads(text)})
    store.put(key, body)


def strip_signature(store, key):
    value = json.loads(body_of(store, key))
    del value["signature"], value["signed_by"]
    store.put(key, sealed(value))


def move(store, key, seq, *, to=None):
    """Put the bytes of one slot into another, of this run or another."""
    (to or store).put(slot_key(seq), body_of(store, key))
