"""A run that signs goes on from what it signed, and from nothing else."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from stoppable import Tiny

from ckptstore import CheckpointStore, IntegrityError, LogOptions, Signing
from ckptstore.errors import InvalidInputError
from ckptstore.format.layout import slot_key
from ckptstore.format.records import Envelope, SetAside, encode_record
from ckptstore.format.version import FORMAT
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.log import RunLog
from ckptstore.training import Checkpointer, resume

SEED = bytes([5] * 32)
PUBLIC = Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw()
SIGNS = LogOptions(signing=Signing(key=SEED, trusted=(PUBLIC,)))


def trained(url, until, options, *, resumes=True):
    tiny = Tiny()
    with Checkpointer(url, tiny.state, every_steps=2, log=options, proof_steps=2, stop_signals=()) as checkpointer:
        if resumes:
            checkpointer.resume()
        tiny.run(checkpointer, until)
    return tiny


def test_a_signed_run_is_resumed_and_its_traces_are_signed(tmp_path):
    url = str(tmp_path / "run")
    trained(url, 4, SIGNS)
    assert trained(url, 7, SIGNS).progress.global_step == 7
    store = CheckpointStore.open(url, log=SIGNS)
    assert [each.global_step for each in store.checkpoints()] == [6, 4, 2]
    traces = [each.trace() for each in store.checkpoints()]
    assert [trace is not None for trace in traces].count(True) >= 1


def test_a_record_that_was_forged_stops_a_resume(tmp_path):
    url = str(tmp_path / "run")
    trained(url, 4, SIGNS)
    log = RunLog.open(open_store(url))
    envelope = Envelope(FORMAT, log.run, log.fold.end, "0" * 32, "2026-01-02T03:04:05.678Z", log.fold.last, None)
    log.store.put(slot_key(log.fold.end), encode_record(SetAside((log.fold.newest.seq,), "abandoned", ""), envelope))
    with pytest.raises(IntegrityError, match="is not signed"):
        trained(url, 8, SIGNS)
    with pytest.raises(IntegrityError, match="is not signed"):
        resume(Tiny().state, url, log=SIGNS)
    assert resume(Tiny().state, url).global_step == 2


def test_who_has_no_key_goes_on_with_no_signed_run(tmp_path):
    url = str(tmp_path / "run")
    trained(url, 4, SIGNS)
    for keyless in (None, LogOptions(signing=Signing(trusted=(PUBLIC,)))):
        with pytest.raises(InvalidInputError, match="no key to sign with"):
            trained(url, 6, keyless)
    assert trained(url, 6, SIGNS).progress.global_step == 6
