"""`metrics` and `alerts`: what Prometheus' own parser reads of them, and what they refuse."""

import json
import os
import time
from datetime import UTC, datetime

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ckptstore.format.records import Retire, Verified
from ckptstore.protocol.claim import claim
from ckptstore.telemetry import METRICS


def read(text):
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def told(run, ckptstore):
    """Return what `metrics` says of a run with a little of everything."""
    for step in (10, 20, 30, 40):
        run.save_described(f"step-{step}", global_step=step)
    run.abandon("step-50")
    run.save_described("step-60", global_step=60)
    run.log.append(lambda _: Verified(2, "full"))
    run.log.append(lambda _: Verified(5, "exists"))
    run.catalog.prove(1, verdict="proved: 5 steps, exact")
    run.catalog.prove(2, verdict="differs: loss")
    run.catalog.set_aside([3], reason="quarantined")
    run.log.append(lambda fold: Retire((4,), "not kept", None) if 4 in fold.commits else None)
    ended = ckptstore("metrics", run.url)
    assert ended.code == 0, ended.err
    return ended


def test_a_run_is_told_by_its_bucket_alone(told, run):
    found = read(told.out)
    assert found[("checkpoint_last_committed_step",)] == 60
    assert found[("checkpoint_commits_total",)] == 5
    assert found[("checkpoint_kept_count",)] == 4
    assert found[("checkpoint_kept_bytes",)] == sum(each.commit.shards.bytes for each in run.log.refresh().kept)
    assert found[("checkpoint_set_aside_count", "quarantined")] == 1
    assert found[("checkpoint_set_aside_count", "abandoned")] == 0
    assert found[("checkpoint_retired_count",)] == 1
    dead = [info.size for info in run.store.list("data/") if "step-50" in info.key]
    assert len(dead) == 2
    assert found[("checkpoint_orphan_count",)] == 1
    assert found[("checkpoint_orphan_bytes",)] == sum(dead)
    assert found[("checkpoint_uncommitted_count",)] == 0
    assert found[("checkpoint_claimed_without_commit",)] == 0
    assert found[("checkpoint_log_tail_lost",)] == 0
    steps = {
        against: found[("checkpoint_recovery_point_steps", against)] for against in ("committed", "verified", "proved")
    }
    assert steps == {"committed": 0, "verified": 60 - 20, "proved": 60 - 10}
    kept = run.log.fold.commits
    for against, seq in (("committed", 5), ("verified", 2), ("proved", 1)):
        age = (datetime.now(UTC) - datetime.fromisoformat(kept[seq].written_at)).total_seconds()
        assert age - 30 < found[("checkpoint_recovery_point_seconds", against)] <= age
    assert {key[0] for key in found} == {name for name, each in METRICS.items() if "bucket" in each.who}


@pytest.mark.parametrize("said", ["yesterday", "2026-01-02T00:00:00"])
def test_a_record_that_says_no_moment_has_no_age_and_the_rest_is_told(run, ckptstore, monkeypatch, said):
    monkeypatch.setattr("ckptstore.protocol.log.timestamp", lambda _: said)
    run.save_described("step-10", global_step=10)
    ended = ckptstore("metrics", run.url)
    assert ended.code == 0, ended.err
    found = read(ended.out)
    assert found[("checkpoint_last_committed_step",)] == 10
    assert not {"checkpoint_recovery_point_seconds", "checkpoint_claim_age_seconds"} & {key[0] for key in found}


def test_every_sample_has_the_runs_name(told, run, ckptstore):
    def names(text):
        return {sample.labels["run"] for each in text_string_to_metric_families(text) for sample in each.samples}

    assert names(told.out) == {"run"}  # the last part of the URL
    assert names(ckptstore("metrics", run.url, "--run", "llama").out) == {"llama"}


def test_the_document_says_the_same(told, run, ckptstore):
    document = ckptstore("metrics", run.url, "--json").json
    assert (document["url"], document["run"], document["lost_tail"]) == (run.store.url, run.log.run, None)
    said = {
        (each["name"], *(v for k, v in sorted(each["labels"].items()) if k != "run")): each["value"]
        for each in document["metrics"]
    }
    found = read(told.out)
    assert said.keys() == found.keys()
    assert said[("checkpoint_orphan_bytes",)] == found[("checkpoint_orphan_bytes",)]


def test_a_file_is_written_for_a_node_exporter_and_nothing_is_printed(told, run, ckptstore, tmp_path):
    ended = ckptstore("metrics", run.url, "--out", tmp_path / "run.prom")
    assert (ended.code, ended.out) == (0, "")
    assert read((tmp_path / "run.prom").read_text()).keys() == read(told.out).keys()
    assert ckptstore("metrics", run.url, "--out", tmp_path / "nowhere" / "run.prom").code == 2


def test_a_claim_that_has_committed_nothing_is_told_and_a_run_that_is_not_there(run, ckptstore, tmp_path):
    claim(run.log, run.job)
    time.sleep(0.05)
    found = read(ckptstore("metrics", run.url).out)
    assert found[("checkpoint_claimed_without_commit",)] == 1
    assert 0.05 <= found[("checkpoint_claim_age_seconds",)] < 60
    ended = ckptstore("metrics", tmp_path / "empty")
    assert ended.code == 0
    assert read(ended.out)[("checkpoint_commits_total",)] == 0
    assert (found[("checkpoint_run_exists",)], read(ended.out)[("checkpoint_run_exists",)]) == (1, 0)
    assert not [key for key in read(ended.out) if "recovery" in key[0]]


def test_damage_is_an_error_and_no_number(run, ckptstore):
    run.save("a")
    run.flip("log/000000000001.json", 20)
    ended = ckptstore("metrics", run.url)
    assert (ended.code, ended.out) == (1, "")


def test_rules_and_dashboard_are_printed_or_written(ckptstore, tmp_path):
    printed = ckptstore("alerts")
    assert printed.out == ckptstore("alerts", "--rules").out
    rules = yaml.safe_load(printed.out)["groups"][0]["rules"]
    assert {"CkptstoreRecoveryPointTooOld", "CkptstoreWriterFenced"} <= {each["alert"] for each in rules}
    board = json.loads(ckptstore("alerts", "--dashboard").out)
    assert board["title"] == "ckptstore"
    assert ckptstore("alerts", "--out", tmp_path).out == ""
    assert (tmp_path / "ckptstore-rules.yml").read_text() == printed.out
    assert json.loads((tmp_path / "ckptstore-dashboard.json").read_text()) == board


def test_thresholds_are_options(ckptstore):
    text = ckptstore("alerts", "--recovery-point-seconds", 7200, "--orphan-gib", 2, "--for-seconds", 60).out
    rules = {each["alert"]: each for each in yaml.safe_load(text)["groups"][0]["rules"]}
    assert rules["CkptstoreRecoveryPointTooOld"]["expr"].endswith("> 7200")
    assert rules["CkptstoreOrphanBytes"]["expr"].endswith(f"> {2 << 30}")
    assert rules["CkptstoreOrphanBytes"]["for"] == "60s"
    assert ckptstore("alerts", "--orphan-gib", 0).code == 2
    assert ckptstore("alerts", "--rules", "--dashboard").code == 2


@pytest.mark.parametrize("gib", ["1e308", "inf", "nan", "-1"])
def test_an_amount_that_cannot_be_is_refused(ckptstore, gib):
    ended = ckptstore("alerts", f"--orphan-gib={gib}")
    assert ended.code == 2
    assert "--orphan-gib must be above 0" in ended.err


def test_a_file_in_place_of_a_folder_is_refused_with_a_hint_that_helps(ckptstore, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "nowhere", tmp_path / "file", ""):
        ended = ckptstore("alerts", "--out", out)
        assert ended.code == 2
        assert "is no folder" in ended.err
        assert "hint: Choose a folder that exists" in ended.err
    assert ckptstore("alerts", "--rules", "--out", tmp_path).code == 2


def test_a_file_is_outside_of_the_run_and_stands_alone(run, ckptstore, tmp_path):
    run.save("a")
    before = run.store.get("latest.json", max_bytes=1 << 20)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out, said in (
        (f"{run.url}/latest.json", "inside the run"),
        (f"{run.url}/new.prom", "inside the run"),
        (pipe, "no regular file"),
        ("", "must be named by a path"),
    ):
        ended = ckptstore("metrics", run.url, "--out", out)
        assert ended.code == 2, out
        assert said in ended.err
    assert run.store.get("latest.json", max_bytes=1 << 20) == before
    assert pipe.is_fifo()
    ended = ckptstore("metrics", run.url, "--json", "--out", tmp_path / "run.prom")
    assert (ended.code, ended.json["error"]) == (2, "invalid_input")
    assert not (tmp_path / "run.prom").exists()


@pytest.mark.parametrize("label", ["\udc80", "two\nlines", "x" * 300])
def test_what_cannot_be_a_label_is_refused(run, ckptstore, label):
    ended = ckptstore("metrics", run.url, "--run", label)
    assert ended.code == 2
    assert "--run llama-7b" in ended.err
