"""Keys come from files or from what the environment names, and nothing of them is shown."""

import os
import shutil
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from ckptstore.errors import InvalidInputError
from ckptstore.signing import MAX_KEY_FILE_BYTES, Signing

SEED = bytes(range(7, 39))
KEY = Ed25519PrivateKey.from_private_bytes(SEED)
PUBLIC = KEY.public_key().public_bytes_raw()


def pem(key, encryption=None):
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


def public_pem(key):
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def file(tmp_path, name, body):
    (tmp_path / name).write_bytes(body)
    return tmp_path / name


@pytest.mark.parametrize("private", [pem(KEY), SEED], ids=["pem", "raw"])
@pytest.mark.parametrize("public", [public_pem(KEY), PUBLIC, PUBLIC.hex().encode() + b"\n"], ids=["pem", "raw", "hex"])
def test_keys_are_read_from_files(tmp_path, private, public):
    key, trusted = file(tmp_path, "key", private), file(tmp_path, "trusted", public)
    read = Signing.read(key=key, trusted=[str(trusted)])
    assert read == Signing(key=SEED, trusted=(PUBLIC,))
    assert read.public == PUBLIC
    assert Signing.read(trusted=trusted).key is None


def test_the_environment_names_files(tmp_path):
    key, one = file(tmp_path, "key", pem(KEY)), file(tmp_path, "one", PUBLIC)
    two = file(tmp_path, "two", bytes(32))
    named = {"CKPTSTORE_SIGNING_KEY_FILE": str(key), "CKPTSTORE_TRUSTED_KEYS": f"{one}{os.pathsep}{two}"}
    assert Signing.from_environment(named) == Signing(key=SEED, trusted=(PUBLIC, bytes(32)))
    assert Signing.from_environment({}) is None
    assert Signing.from_environment({}, trusted=[one]) == Signing(trusted=(PUBLIC,))
    with pytest.raises(InvalidInputError, match="without trusted"):
        Signing.from_environment({}, signed_from=3)


@pytest.mark.parametrize(
    ("role", "body"),
    [
        ("key", b"hush" * 9),
        ("key", b""),
        ("key", pem(KEY, BestAvailableEncryption(b"hush"))),
        ("key", pem(generate_private_key(SECP256R1()))),
        ("key", public_pem(KEY)),
        ("key", b"x" * (MAX_KEY_FILE_BYTES + 1)),
        ("trusted", pem(KEY)),
        ("trusted", public_pem(generate_private_key(SECP256R1()))),
        ("trusted", b"hush" * 9),
        ("trusted", SEED.hex().encode() + b"00"),
        ("key", None),
        ("trusted", None),
    ],
)
def test_a_file_that_holds_no_such_key_is_refused_and_not_shown(tmp_path, role, body):
    place = tmp_path / "absent" if body is None else file(tmp_path, "file", body)
    given = {"key": place} if role == "key" else {"trusted": [place]}
    with pytest.raises(InvalidInputError) as caught:
        Signing.read(**given)
    told = f"{caught.value!r} {caught.value} {caught.value.facts}"
    assert str(place) in told
    for line in (body or b"absent!").splitlines():
        assert line.decode()[:20] not in told or len(line) < 8


def test_openssl_makes_keys_that_are_read(tmp_path):
    key, trusted = tmp_path / "signing.pem", tmp_path / "trusted.pem"
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("There is no openssl here.")
    for words in (["genpkey", "-algorithm", "ed25519", "-out", str(key)], ["pkey", "-pubout", "-out", str(trusted)]):
        given = key.read_bytes() if key.exists() else None
        subprocess.run([program, *words], check=True, capture_output=True, input=given)
    read = Signing.read(key=key, trusted=[trusted])
    assert read.trusted == (read.public,)


def test_the_package_is_imported_by_who_signs_only():
    code = (
        "import sys, ckptstore, ckptstore.cli.app\n"
        "ckptstore.CheckpointStore.open('memory://x').latest()\n"
        "assert 'cryptography' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_package_a_hint_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(Exception, match="cryptography") as caught:
        Signing(key=SEED)
    assert caught.value.code == "unsupported"
    assert "pip install 'ckptstore[signing]'" in caught.value.hint
