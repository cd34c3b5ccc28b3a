"""The rules: Prometheus takes them, recorded incidents fire the right ones, and a healthy run none."""

import json
import re
import shlex
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import typer
from metered import RUN, Store, parsed, scraped
from promtool import check_fires, promtool
from trainings import Training

from ckptstore import AccessDeniedError, CheckpointStore, FencedError
from ckptstore.cli.app import app
from ckptstore.clock import SystemClock
from ckptstore.errors import InvalidInputError
from ckptstore.events import DamageFound, RestoreFailed
from ckptstore.format.records import Verified
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.log import RunLog
from ckptstore.telemetry import METRICS, Metrics, Thresholds, bucket_families, dashboard, rules
from ckptstore.telemetry.alerts import alerts_at
from ckptstore.telemetry.client import exposition
from ckptstore.testing import simulated
from ckptstore.training import Checkpointer
from storage_writers import roots

AGAIN = 8
"""Scrapes, a minute each, for which an incident lasts: longer than an alert waits."""
HOUR = 60


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "run")


class Watched:
    """A training of one process with what Prometheus scrapes of it and of its bucket, a minute of each step."""

    def __init__(self, url, **options):
        self.url, self.training, self.scrapes = url, Training(**options.pop("training", {})), []
        self.batches = iter(())
        self.metrics = Metrics(run=RUN)
        self.port = self.metrics.serve(port=0)
        with mock.patch.object(roots, "open_store", lambda *given, **more: Store(open_store(*given, **more))):
            self.checkpointer = Checkpointer(
                url,
                self.training.state,
                **{"background": False, "proof_steps": 3, "observer": self.metrics, **options},
            )

    def scrape(self, times=1, *, bucket=True):
        for _ in range(times):
            seen = {"rank-0": scraped(self.port)}
            self.scrapes.append({**seen, "bucket": of_bucket(self.url)} if bucket else seen)

    def train(self, steps):
        for _ in range(steps):
            batch = next(self.batches, None)
            if batch is None:  # one iteration an epoch: each draws a random number when it begins
                self.batches = iter(self.training.loader)
                batch = next(self.batches)
            loss, norm, ids = self.training.step(batch)
            self.checkpointer.observe(loss=loss, grad_norm=norm, batch_ids=ids)
            if self.checkpointer.due():
                self.checkpointer.save()
            self.scrape()

    def close(self):
        self.checkpointer.close()
        self.metrics.close()


def of_bucket(url):
    catalog = Catalog(RunLog.open(open_store(url)))
    return parsed(exposition(bucket_families(catalog, run=RUN, clock=SystemClock())).decode())


@contextmanager
def watched(url, **options):
    run = Watched(url, **options)
    try:
        yield run
    finally:
        run.metrics.close()
        run.checkpointer.writer.let_go()


def test_prometheus_takes_the_rules_and_what_the_dashboard_asks(tmp_path):
    (tmp_path / "rules.yml").write_text(rules())
    ended = promtool("check", "rules", tmp_path / "rules.yml")
    assert ended.returncode == 0, ended.stderr
    assert f"{len(alerts_at(Thresholds()))} rules found" in ended.stdout
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    as_rules = [{"record": f"asked:{at}", "expr": expr} for at, expr in enumerate(asked)]
    (tmp_path / "asked.yml").write_text(json.dumps({"groups": [{"name": "asked", "rules": as_rules}]}))
    ended = promtool("check", "rules", tmp_path / "asked.yml")
    assert ended.returncode == 0, ended.stderr


def test_rules_and_dashboard_ask_for_metrics_that_there_are_and_the_dashboard_for_all():
    asked = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    in_rules, in_boards = ({*_metrics(text)} for text in (rules(), " ".join(asked)))
    assert in_rules | in_boards <= METRICS.keys()
    assert METRICS.keys() == in_boards


def _metrics(text):
    for word in re.findall(r"\b(?:checkpoint|resume)_\w+", text):
        yield re.sub("_(bucket|sum|count)$", "", word) if word not in METRICS else word


def test_every_alert_says_what_it_means_and_what_to_run():
    found = alerts_at(Thresholds())
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert each.name.startswith("Ckptstore")
        program, name, *arguments = shlex.split(each.command)
        assert program == "ckptstore"
        typer.main.get_command(app).commands[name].make_context(name, arguments)  # raises what a wrong usage is
        assert each.summary.endswith(".")
        assert each.description.endswith(".")
        assert each.severity in ("critical", "warning")
        for further in re.findall(r"by: (ckptstore .+?)\.(?: |$)", each.description):
            _, name, *arguments = shlex.split(further)
            typer.main.get_command(app).commands[name].make_context(name, arguments)


@pytest.mark.parametrize("value", [0, -1, 1e300, float("nan"), float("inf"), "x", None, True])
def test_a_threshold_that_can_never_be_met_is_refused(value):
    for name in ("commit_lag_seconds", "orphan_bytes", "for_seconds", "busy_seconds"):
        with pytest.raises(InvalidInputError, match=name):
            Thresholds(**{name: value})


def test_a_part_of_a_second_is_said_as_it_is(tmp_path):
    text = rules(Thresholds(for_seconds=0.25, busy_seconds=1.5))
    assert "for: 250ms" in text
    assert "[1500ms]" in text
    with pytest.raises(InvalidInputError, match="for_seconds"):
        Thresholds(for_seconds=0.0001)
    (tmp_path / "rules.yml").write_text(text)
    ended = promtool("check", "rules", tmp_path / "rules.yml")
    assert ended.returncode == 0, ended.stderr


def test_a_root_without_a_run_is_told_by_the_bucket(url, tmp_path):
    check_fires(tmp_path, rules(), [{"bucket": of_bucket(url)} for _ in range(AGAIN)], ["CkptstoreNoRun"])


def test_a_healthy_run_is_silent(url, tmp_path):
    """It saves in the background, stops, resumes with a proof, and goes on; an hour of scrapes."""
    with watched(url, every_steps=4, background=True) as run:
        run.train(30)
        run.close()
    with watched(url, every_steps=4, background=True, training={"seed": 2}) as again:
        report = again.checkpointer.resume()
        again.train(30)
        again.close()
    assert report.proof.is_proved
    check_fires(tmp_path, rules(), [*run.scrapes, *again.scrapes], [])


def test_a_store_that_refuses_every_save_is_told(url, tmp_path):
    with watched(url) as run:
        run.train(2)
        run.checkpointer.save()
        run.train(1)
        with Store.refusing("rank-"):
            for _ in range(3):
                with pytest.raises(AccessDeniedError):
                    run.checkpointer.save()
                run.train(1)
            time.sleep(0.5)
            run.scrape(AGAIN)
    at = Thresholds(recovery_point_seconds=0.5)
    check_fires(tmp_path, rules(at), run.scrapes, ["CkptstoreRecoveryPointTooOld", "CkptstoreSavesFailing"])


def test_a_save_that_hangs_is_told(url, tmp_path):
    with watched(url, background=True) as run:
        run.train(1)
        with Store.holding("rank-") as go:
            run.checkpointer.save()
            time.sleep(0.5)
            run.scrape(32)
            go()
            run.checkpointer.wait()
    at = Thresholds(commit_lag_seconds=0.5)
    check_fires(tmp_path, rules(at), run.scrapes, ["CkptstoreCommitLagHigh", "CkptstoreSavesPilingUp"])


def test_saves_that_are_skipped_are_told(url, tmp_path):
    with watched(url, background=True, when_busy="skip") as run:
        run.train(1)
        with Store.holding("rank-") as go:
            run.checkpointer.save()
            run.train(1)
            assert run.checkpointer.save().skipped
            go()
            run.checkpointer.wait()
        run.train(2)
    check_fires(tmp_path, rules(), run.scrapes, ["CkptstoreSavesPilingUp"])


def test_a_job_that_was_fenced_is_told(url, tmp_path):
    with watched(url) as run:
        run.train(1)
        run.checkpointer.save()
        claim(RunLog.open(open_store(url)), Incarnation.new(job="other", host="elsewhere"))
        run.train(1)
        with pytest.raises(FencedError):
            run.checkpointer.save()
        run.train(1)
    check_fires(tmp_path, rules(), run.scrapes, ["CkptstoreWriterFenced"])


def test_a_damaged_checkpoint_is_told(url, tmp_path):
    with watched(url) as run:
        for _ in range(2):
            run.train(1)
            run.checkpointer.save()
        run.checkpointer.close()
    store, objects = CheckpointStore.open(url), open_store(url)
    prefix = store.latest().commit.prefix
    (key,) = (info.key for info in objects.list("data/") if prefix in info.key and "rank-" in info.key)
    body = bytearray(objects.get(key, max_bytes=1 << 24))
    body[-1] ^= 1
    objects.put(key, bytes(body))
    with watched(url) as again:
        again.checkpointer.resume()
        again.train(2)
    check_fires(tmp_path, rules(), again.scrapes, ["CkptstoreChecksumFailure", "CkptstoreRestoreFailed"])
    whole = of_bucket(url)
    store.set_aside("step-2", reason="quarantined")
    quarantined = of_bucket(url)
    assert quarantined[("checkpoint_set_aside_count", ("reason", "quarantined"))] == 1
    told = [{"bucket": each} for each in (whole, whole, quarantined, quarantined)]
    check_fires(tmp_path, rules(), told, ["CkptstoreChecksumFailure"])
    check_fires(tmp_path, rules(), [*told, *[told[-1]] * HOUR], [])


@pytest.mark.parametrize("before", [0, 3], ids=["new process", "seen before"])
def test_an_alert_of_damage_ends_an_hour_later_and_comes_again_with_the_next(tmp_path, before):
    """The process goes on for days with what it has counted: that is no reason to call anybody again."""
    metrics = Metrics(run=RUN)
    scrapes = [{"rank-0": parsed(metrics.exposition().decode())} for _ in range(before)]
    tell_damage(metrics)
    seen = {"rank-0": parsed(metrics.exposition().decode())}
    fires = ["CkptstoreChecksumFailure", "CkptstoreRestoreFailed"]
    check_fires(tmp_path, rules(), [*scrapes, seen, seen], fires)
    later = [*scrapes, *[seen] * (HOUR + 2)]
    check_fires(tmp_path, rules(), later, [])
    tell_damage(metrics)
    check_fires(tmp_path, rules(), [*later, {"rank-0": parsed(metrics.exposition().decode())}], fires)


def tell_damage(metrics):
    metrics(DamageFound("data/a"))
    metrics(RestoreFailed("a", "integrity"))


def test_a_resume_that_goes_on_otherwise_is_told(url, tmp_path):
    with watched(url) as run:
        run.train(2)
        run.checkpointer.save()
        run.train(4)
        run.close()
    with watched(url) as again:
        again.checkpointer.resume()
        with torch.no_grad():
            for each in again.training.model.parameters():
                each.add_(0.5)
        again.train(4)
    check_fires(tmp_path, rules(), again.scrapes, ["CkptstoreResumeDiffers"])


def test_checkpoints_that_nobody_verified_or_proved_for_long_are_told(url, tmp_path):
    with watched(url) as run:
        run.train(1)
        run.checkpointer.save()
        log = RunLog.open(open_store(url))
        log.append(lambda fold: Verified(fold.newest.seq, "full"))
        CheckpointStore.open(url).prove("step-1", verdict="proved: by hand")
        time.sleep(0.5)
        run.train(1)
        run.checkpointer.save()
        run.scrape(AGAIN)
    at = Thresholds(verified_point_seconds=0.5, proved_point_seconds=0.5)
    expected = ["CkptstoreProvedPointTooOld", "CkptstoreVerifiedPointTooOld"]
    check_fires(tmp_path, rules(at), run.scrapes, expected)


def test_checkpoints_none_of_which_was_ever_verified_or_proved_are_told(url, tmp_path):
    simulated.save(RunLog.create(open_store(url)), Incarnation.new(job="gpt", host="node-1"), "a")
    scrapes = [{"bucket": of_bucket(url)} for _ in range(2 * AGAIN)]
    at = Thresholds(verified_point_seconds=5 * 60, proved_point_seconds=12 * 60)
    check_fires(tmp_path, rules(at), scrapes, ["CkptstoreVerifiedPointTooOld"])
    at = Thresholds(verified_point_seconds=60, proved_point_seconds=60)
    expected = ["CkptstoreProvedPointTooOld", "CkptstoreVerifiedPointTooOld"]
    check_fires(tmp_path, rules(at), scrapes, expected)


def test_what_is_known_of_a_run_outlives_a_restart_and_ends_with_the_job(url, tmp_path):
    """Several instances of one run are one run; who exposes nothing any more is no run without checkpoints."""
    at = Thresholds(verified_point_seconds=5 * 60, proved_point_seconds=30 * 60)
    log, job = RunLog.create(open_store(url)), Incarnation.new(job="gpt", host="node-1")
    simulated.save(log, job, "a")
    unverified = of_bucket(url)
    log.append(lambda fold: Verified(fold.newest.seq, "full"))
    verified = of_bucket(url)
    ended = [{"rank-0": verified}] * 12 + [{}] * 10
    check_fires(tmp_path, rules(at), ended, [])
    restarted = [{"rank-0": verified}] * 12 + [{"rank-0": unverified}] * 4  # it has not read the log to its end yet
    check_fires(tmp_path, rules(at), restarted, [])
    two = [{"node-1": unverified, "bucket": unverified}] * 9 + [{"node-2": unverified, "bucket": unverified}] * 9
    check_fires(tmp_path, rules(at), two, ["CkptstoreVerifiedPointTooOld"])
    moved = [{"node-1": unverified}] * 9 + [{"node-2": unverified}] * 9
    check_fires(tmp_path, rules(at), moved, ["CkptstoreVerifiedPointTooOld"])


def test_what_dead_saves_leave_and_a_claim_that_commits_nothing_are_told_by_the_bucket(url, tmp_path):
    log, job = RunLog.create(open_store(url)), Incarnation.new(job="gpt", host="node-1")
    simulated.save(log, job, "a")
    attempt = begin(log, job, checkpoint_id="b", world_size=1)
    simulated.upload(log.store, attempt, 0)
    claim(log, Incarnation.new(job="gpt", host="node-2"))
    time.sleep(0.3)
    seen = of_bucket(url)
    size = sum(info.size for info in log.store.list("data/") if "/b.t" in info.key)
    assert (seen[("checkpoint_orphan_count",)], seen[("checkpoint_orphan_bytes",)]) == (1, size)
    at = Thresholds(orphan_bytes=size - 1, recovery_point_seconds=0.2)
    expected = ["CkptstoreClaimedWithoutCommit", "CkptstoreOrphanBytes", "CkptstoreRecoveryPointTooOld"]
    check_fires(tmp_path, rules(at), [{"bucket": of_bucket(url)} for _ in range(AGAIN)], expected)


def test_a_log_that_lost_its_tail_is_told_by_the_bucket(url, tmp_path):
    log, job = RunLog.create(open_store(url)), Incarnation.new(job="gpt", host="node-1")
    simulated.save(log, job, "a")
    simulated.save(log, job, "b")
    log.store.delete("log/000000000002.json")
    check_fires(tmp_path, rules(), [{"bucket": of_bucket(url)}], ["CkptstoreLogTailLost"])


@pytest.mark.parametrize("gone", [("log/", "run.json"), ("log/", "latest.json"), ("log/", "run.json", "latest.json")])
def test_a_log_that_was_lost_whole_is_told_by_the_bucket_as_damage_and_not_as_a_wrong_url(url, tmp_path, gone):
    log = RunLog.create(open_store(url))
    simulated.save(log, Incarnation.new(job="gpt", host="node-1"), "a")
    for info in list(log.store.list("")):
        if info.key.startswith(gone):
            log.store.delete(info.key)
    seen = of_bucket(url)
    assert ("checkpoint_uncommitted_count",) not in seen  # what is committed is not known
    check_fires(tmp_path, rules(), [{"bucket": seen}] * AGAIN, ["CkptstoreLogTailLost"])
