"""Saves and loads of signed runs, through DCP's own faces and in a copy of the writer."""

import pickle

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import storage_writers as sw
from ckptstore import CheckpointStore, IntegrityError, InvalidInputError, LogOptions, Signing

SEED = bytes([5] * 32)
PUBLIC = Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw()
SIGNS = LogOptions(signing=Signing(key=SEED, trusted=(PUBLIC,)))
REQUIRES = LogOptions(signing=Signing(trusted=(PUBLIC,)))


def save(writer, name):
    sw.save({"w": torch.ones(3)}, checkpoint_id=name, storage_writer=writer)


def load(url, log):
    target = {"w": torch.zeros(3)}
    sw.load(target, storage_reader=sw.CkptStoreReader(url, log=log))
    return target["w"].sum().item()


def test_a_signed_save_is_loaded_by_who_requires_it(url):
    save(sw.CkptStoreWriter(url, log=SIGNS), "step-1")
    assert load(url, REQUIRES) == 3.0


def test_an_unsigned_save_is_loaded_by_nobody_who_requires_it(url):
    save(sw.CkptStoreWriter(url), "step-1")
    with pytest.raises(IntegrityError, match="is not signed"):
        load(url, REQUIRES)
    assert load(url, None) == 3.0


def test_who_has_no_key_saves_nothing_above_a_signed_save(url):
    save(sw.CkptStoreWriter(url, log=SIGNS), "step-1")
    with pytest.raises(InvalidInputError, match="no key to sign with"):
        save(sw.CkptStoreWriter(url), "step-2")
    assert load(url, REQUIRES) == 3.0


def test_the_copy_of_a_writer_in_another_process_signs_too(url):
    writer = pickle.loads(pickle.dumps(sw.CkptStoreWriter(url, log=SIGNS)))  # noqa: S301  (our own bytes)
    save(writer, "step-1")
    assert [each.checkpoint_id for each in CheckpointStore.open(url, log=REQUIRES).checkpoints()] == ["step-1"]
