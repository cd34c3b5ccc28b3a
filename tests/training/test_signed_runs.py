"""A run that signs goes on from what it signed, and from nothing else."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from stoppable import Tiny

from ckptstore import CheckpointStore, IntegrityError, LogOptions, Signing
from ckptstore.training import Checkpointer, resume

SEED = bytes([5] * 32)
PUBLIC = Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw()
SIGNS = LogOptions(signing=Signing(key=SEED, trusted=(PUBLIC,)))


def trained(url, until, log, *, resumes=True):
    tiny = Tiny()
    with Checkpointer(url, tiny.state, every_steps=2, log=log, proof_steps=2, stop_signals=()) as checkpointer:
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


def test_a_commit_that_was_forged_stops_a_resume(tmp_path):
    url = str(tmp_path / "run")
    trained(url, 4, SIGNS)
    trained(url, 6, None)
    with pytest.raises(IntegrityError, match="is not signed"):
        trained(url, 8, SIGNS)
    with pytest.raises(IntegrityError, match="is not signed"):
        resume(Tiny().state, url, log=SIGNS)
    assert resume(Tiny().state, url).global_step == 6
