"""Every command can be told whose records count; `log` and `doctor` say who signed."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptstore.cli import access
from ckptstore.cli.exits import Exit
from ckptstore.objectstore.urls import open_store
from ckptstore.options import LogOptions
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.log import RunLog
from ckptstore.signing import Signing
from ckptstore.testing import simulated

SEED, STRANGER = bytes([1] * 32), bytes([2] * 32)


def public_of(seed):
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


@pytest.fixture
def keys(tmp_path):
    """Files: of the trainer's two keys, and of a stranger's public one."""
    for name, body in (("key", SEED), ("trusted", public_of(SEED)), ("other", public_of(STRANGER))):
        (tmp_path / name).write_bytes(body)
    return tmp_path


@pytest.fixture
def signed(tmp_path, keys):
    """The URL of a run with one signed checkpoint."""
    url = str(tmp_path / "run")
    log = RunLog.create(open_store(url), options=LogOptions(signing=Signing(key=SEED)))
    simulated.save(log, Incarnation.new(job="gpt", host="node-1"), "step-1", step=1)
    return url


READERS = [
    ["ls"],
    ["latest"],
    ["log"],
    ["show"],
    ["tree"],
    ["verify"],
    ["doctor", "--quick", "--for", "reader"],
    ["doctor", "--uploads"],
    ["pin", "step-1", "--holder", "eval"],
    ["rollback", "step-1", "--yes"],
    ["gc"],
    ["repair"],
    ["retire", "--keep-last", "2", "--yes"],
]


def command(words, url):
    return [words[0], url, *words[1:]]


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_every_command_reads_a_signed_run_and_refuses_one_of_a_stranger(ckptstore, keys, signed, words, monkeypatch):
    monkeypatch.setenv("CKPTSTORE_SIGNING_KEY_FILE", str(keys / "key"))
    assert ckptstore(*command(words, signed), "--require-signature", str(keys / "trusted")).code == Exit.FINE
    monkeypatch.delenv("CKPTSTORE_SIGNING_KEY_FILE")
    refused = ckptstore(*command(words, signed), "--require-signature", str(keys / "other"))
    assert refused.code == Exit.BAD
    assert "is not trusted" in refused.out + refused.err


def test_trusted_keys_may_come_from_the_environment(ckptstore, keys, signed, monkeypatch):
    monkeypatch.setenv("CKPTSTORE_TRUSTED_KEYS", str(keys / "other"))
    assert ckptstore("ls", signed).code == Exit.BAD
    assert ckptstore("ls", signed, "--require-signature", str(keys / "trusted")).code == Exit.FINE  # one of the two


def test_a_command_signs_what_it_appends_and_without_a_key_appends_nothing(ckptstore, keys, signed, monkeypatch):
    trusted = ["--require-signature", str(keys / "trusted")]
    pin = ("pin", signed, "step-1", "--holder", "eval")
    for more in ([], trusted):
        keyless = ckptstore(*pin, *more)
        assert (keyless.code, "No record was appended" in keyless.err) == (Exit.INPUT, True)
    monkeypatch.setenv("CKPTSTORE_SIGNING_KEY_FILE", str(keys / "key"))
    assert ckptstore(*pin, *trusted).code == Exit.FINE
    told = ckptstore("log", signed, *trusted, "--json")
    assert (told.code, [each["record"]["kind"] for each in told.json["records"]]) == (0, ["CLAIM", "COMMIT", "PIN"])


def test_the_log_and_doctor_say_who_signed(ckptstore, keys, signed):
    signer = public_of(SEED).hex()
    told = ckptstore("log", signed, "--json").json["records"]
    assert [each["signed_by"] for each in told] == [signer, signer]
    assert f"  {signer[:16]}  " in ckptstore("log", signed).out
    quick = ("doctor", signed, "--quick", "--for", "reader", "--json")
    checks = {check["name"]: check for check in ckptstore(*quick).json["checks"] if check["group"] == "run"}
    assert checks["signature"]["facts"] == {"signed_by": signer}
    assert "was not checked" in checks["signature"]["message"]
    checks = ckptstore(*quick, "--require-signature", str(keys / "trusted")).json["checks"]
    assert "is trusted" in next(check["message"] for check in checks if check["name"] == "signature")


def test_an_unsigned_log_is_shown_without_a_column_for_it(ckptstore, tmp_path):
    url = str(tmp_path / "unsigned")
    simulated.save(RunLog.create(open_store(url)), Incarnation.new(job="gpt", host="node-1"), "step-1")
    assert "SIGNED BY" not in ckptstore("log", url).out
    assert [each["signed_by"] for each in ckptstore("log", url, "--json").json["records"]] == [None, None]


def test_a_run_that_began_unsigned_is_read_from_a_slot_on(ckptstore, keys, tmp_path):
    url, trusted = str(tmp_path / "mixed"), ["--require-signature", str(keys / "trusted")]
    simulated.save(RunLog.create(open_store(url)), Incarnation.new(job="gpt", host="node-1"), "step-1")
    log = RunLog.create(open_store(url), options=LogOptions(signing=Signing(key=SEED)))
    simulated.save(log, Incarnation.new(job="gpt", host="node-1"), "step-2")
    assert ckptstore("ls", url, *trusted).code == Exit.BAD
    assert ckptstore("ls", url, *trusted, "--signed-from", "2").code == Exit.FINE
    assert ckptstore("ls", url, "--signed-from=2", *trusted).code == Exit.FINE
    assert ckptstore("ls", url, "--signed-from", "2").code == Exit.INPUT


def test_a_hint_repeats_whose_records_count(keys):
    access.forget()
    access.keep(None, (), require_signature=[str(keys / "trusted")], signed_from=2)
    access.keep_url("memory://x")
    told = access.pointed("Run `ckptstore ls URL`.")
    access.forget()
    assert told == f"Run `ckptstore ls memory://x --require-signature {keys / 'trusted'} --signed-from 2`."


def test_a_key_that_cannot_be_read_is_an_input_error_with_nothing_of_it(ckptstore, tmp_path):
    (tmp_path / "bad").write_text("hush-hush-hush")
    answer = ckptstore("ls", "memory://x", "--require-signature", str(tmp_path / "bad"), "--json")
    assert answer.code == Exit.INPUT
    assert "hush" not in json.dumps(answer.json)
