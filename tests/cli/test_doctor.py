"""`doctor`: the table, the document and the exit code of an examination."""

from __future__ import annotations

import json

import pytest
from odd_stores import Denies, IgnoresTheCondition, KeepsTheDeleted, NamesNoUploads

from ckptstore.cli import doctor
from ckptstore.objectstore.bucket import BucketSettings, Lock
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from localstack.ports import free_port_pairs

GROUPS = {"store", "permission", "clock", "run"}


@pytest.fixture
def odd(monkeypatch, tmp_path):
    """Make `doctor` open a store that does one thing differently; return the plain one."""

    def install(kind, *arguments):
        plain = MemoryStore("s3://bucket/run")
        monkeypatch.setattr(doctor, "open_store", lambda *_, **__: kind(plain, *arguments))
        monkeypatch.setattr(doctor, "bucket_settings", lambda *_, **__: None)
        return plain

    return install


@pytest.mark.parametrize(
    ("store", "options", "verdict", "others"),
    [
        ((NamesNoUploads,), [], "Fit for a trainer.", "fit for a reader; fit for a collector."),
        (
            (NamesNoUploads,),
            ["--quick"],
            "Fit for a trainer, as far as was tried; not tried: multipart.",
            "fit for a reader; fit for a collector.",
        ),
        (
            (IgnoresTheCondition,),
            ["--quick"],
            "NOT FIT for a trainer: 2 failed.",
            "fit for a reader; NOT FIT for a collector.",
        ),
        (
            (Denies, "create"),
            ["--quick"],
            "NOT FIT for a trainer: 1 failed.",
            "fit for a reader; NOT FIT for a collector.",
        ),
        (
            (Denies, "create"),
            ["--for", "reader"],
            "Fit for a reader, as far as was tried; not tried: read.",
            "perhaps fit for a trainer; perhaps fit for a collector.",
        ),
    ],
)
def test_verdict_permissions_and_what_is_to_be_done_agree(ckptstore, odd, store, options, verdict, others):
    odd(*store)
    told = ckptstore("doctor", "s3://bucket/run", *options).out
    assert f"\n{verdict}\nOthers: {others}\n" in told
    assert ("To do:" in told) is ("NOT FIT for a trainer" in verdict)


def test_a_hint_in_the_report_names_the_run(ckptstore, odd, monkeypatch):
    odd(ForwardingStore)
    rules = BucketSettings("run/", keeps_versions=False, rules=(), lock=Lock())
    monkeypatch.setattr(doctor, "bucket_settings", lambda *_, **__: rules)
    shown = "`ckptstore doctor s3://bucket/run -o profile=train --uploads`"
    told = ckptstore("doctor", "s3://bucket/run", "--quick", "-o", "profile=train")
    assert shown in told.out
    told = ckptstore("doctor", "s3://bucket/run", "--quick", "-o", "profile=train", "--json").json
    assert any(shown in check["hint"] for check in told["checks"])


def test_a_sound_place_is_fine_and_nothing_of_a_run_is_made(ckptstore, tmp_path):
    ended = ckptstore("doctor", tmp_path / "run")
    assert ended.code == 0
    assert "ok       store: create once in a race" in ended.out
    assert "Fit for a trainer." in ended.out
    assert list(open_store(tmp_path / "run").list("")) == []


def test_the_document_has_every_check_with_stable_keys(ckptstore, tmp_path):
    document = ckptstore("doctor", tmp_path / "run", "--json").json
    assert document["ok"] is True
    assert {check["group"] for check in document["checks"]} >= GROUPS
    keys = {"group", "name", "verdict", "value", "unit", "message", "hint", "error", "facts"}
    assert all(set(check) == keys for check in document["checks"])
    assert document["roles"] == {"reader": True, "trainer": True, "collector": True}
    assert document["left_behind"] == []
    offset = next(check for check in document["checks"] if check["group"] == "clock")
    assert (offset["name"], offset["unit"], abs(offset["value"]) < 2) == ("offset", "s", True)


def test_a_run_is_not_changed_and_a_claim_without_a_commit_is_told(ckptstore, run):
    run.save("a")
    before = {info.key: info.size for info in run.store.list("")}
    ended = ckptstore("doctor", run.url, "--quick")
    assert (ended.code, {info.key: info.size for info in run.store.list("")}) == (0, before)
    assert "Job gpt on node-1" in ended.out
    assert "no commit since" not in ended.out
    fresh = type(run)(run.url + "-2")
    fresh.abandon("x")
    ended = ckptstore("doctor", fresh.url, "--quick")
    assert ended.code == 0
    assert "claimed, no commit since" in ended.out


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "code"),
    [
        (IgnoresTheCondition, (), [], 6),
        (KeepsTheDeleted, (), [], 6),
        (Denies, ("absent",), [], 6),
        (Denies, ("create",), [], 4),
        (Denies, ("list",), [], 4),
        (Denies, ("delete",), [], 0),
        (Denies, ("delete",), ["--for", "collector"], 4),
        (Denies, ("create", "delete"), ["--for", "reader"], 0),
        (Denies, ("absent", "create"), [], 6),  # a job would be told so first
        (Denies, ("absent", "list"), [], 6),
        (Denies, ("absent", "list", "create"), [], 4),
    ],
)
def test_the_exit_code_says_what_kind_of_thing_is_wrong(ckptstore, odd, kind, arguments, options, code):
    odd(kind, *arguments)
    ended = ckptstore("doctor", "s3://bucket/run", "--quick", *options, "--json")
    assert ended.code == code
    assert ended.json.get("ok", False) is (code == 0)


def test_a_damaged_log_is_exit_code_1_and_a_later_release_6(ckptstore, run):
    run.save("a")
    run.append_foreign(kind="MERGE", format=2)
    assert ckptstore("doctor", run.url, "--quick").code == 6
    run.flip("log/000000000001.json", 30)
    assert ckptstore("doctor", run.url, "--quick").code == 1


def test_every_failure_and_warning_says_what_to_do(ckptstore, odd):
    odd(Denies, "delete", "list uploads", "overwrite")
    ended = ckptstore("doctor", "s3://bucket/run", "--quick")
    todo = ended.out.partition("To do:")[2]
    for right in ("s3:DeleteObject", "s3:ListBucketMultipartUploads", "s3:PutObject"):
        assert right in todo
    assert "could not be deleted: probe/" in ended.err


@pytest.mark.parametrize("more", [["--for", "king"], ["--engine", "nope"], ["--what"]])
def test_what_makes_no_sense_is_refused(ckptstore, tmp_path, more):
    ended = ckptstore("doctor", tmp_path / "run", *more, "--json")
    assert ended.code == 2
    assert ended.json["hint"]
    assert not (tmp_path / "run").exists()


def test_help_says_what_it_exits_with_and_what_it_leaves(ckptstore):
    told = " ".join(ckptstore("doctor", "--help").out.split())
    assert "which it deletes again" in told
    assert "exits with 6" in told


@pytest.mark.servers
def test_on_an_object_store_it_is_fine_and_an_unreadable_one_is_one_error(ckptstore, s3_url, monkeypatch):
    document = ckptstore("doctor", s3_url, "--json").json
    assert document["ok"] is True
    settings = {check["name"]: check["verdict"] for check in document["checks"] if check["group"] == "bucket"}
    assert settings.keys() == {"lifecycle rules", "incomplete uploads", "versioning", "object lock"}
    assert settings["incomplete uploads"] == "warning"
    assert document["roles"]["trainer"] is True
    assert list(open_store(s3_url).list("")) == []
    ended = ckptstore("doctor", "s3://no-such-bucket-anywhere/run", "--json")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-is-not-it")
        ended = ckptstore("doctor", s3_url, "--json")
        assert (ended.code, ended.json["error"]) == (4, "access_denied")
        assert "hunter2" not in json.dumps(ended.json)
    (port,) = free_port_pairs(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    ended = ckptstore("doctor", s3_url, "--json")
    assert (ended.code, ended.json["error"]) == (4, "unavailable")
