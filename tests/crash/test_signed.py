"""The enumerations of `test_enumeration.py` with records that are signed and must be."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions
from ckptstore.signing import Signing
from ckptstore.testing.enumeration import enumerations

SEED = bytes([9] * 32)
PUBLIC = Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw()
SIGNED = enumerations(LogOptions(signing=Signing(key=SEED, trusted=(PUBLIC,))))
LONG = ("single writer", "many writers", "each fault", "each intrusion", "single writer, each death", "each death")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in SIGNED]
)
def test_no_fault_at_any_call_of_a_signed_run_breaks_an_invariant(name):
    """I1, I2, I3, I4, I5, I6, I7, I10, I11, I15, I16: a signature is made once for a slot, like the rest of it."""
    assert list(SIGNED[name](MemoryStore)) == []
