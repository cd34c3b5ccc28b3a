"""What is exposed of events: by HTTP, by a file, in numbers that are right at every moment."""

import builtins
import logging
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest
from metered import RUN, parsed, scraped, until
from prometheus_client import CollectorRegistry, Counter

from ckptstore.clock import timestamp
from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.events import (
    AttemptBegan,
    Claimed,
    PhaseEnded,
    Point,
    ProofEnded,
    RecoveryPoints,
    RestoreFailed,
    Resumed,
    SaveAbandoned,
    SaveBegan,
    SaveEnded,
    ShardStored,
    Stepped,
    tell,
)
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.log import RunLog
from ckptstore.telemetry import METRICS, Metrics, Spans
from ckptstore.testing import simulated
from ckptstore.wholefile import write_whole


class Clock:
    """Stands still until it is moved on."""

    def __init__(self):
        self.at = 1000.0

    def now(self):
        return datetime(2026, 1, 2, tzinfo=UTC) + timedelta(seconds=self.at)

    def monotonic(self):
        return self.at

    def sleep(self, seconds):
        self.at += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def metrics(clock):
    metrics = Metrics(run=RUN, clock=clock)
    yield metrics
    metrics.close()


def read(metrics):
    return parsed(metrics.exposition().decode())


def test_a_new_one_counts_from_zero_and_says_nothing_of_what_it_does_not_know(metrics):
    found = read(metrics)
    assert {value for key, value in found.items() if "_created" not in key[0]} == {0.0}
    names = {key[0] for key in found}
    assert "checkpoint_last_committed_step" not in names
    assert "resume_loss_delta" not in names
    assert ("checkpoint_save_failures_total", ("reason", "fenced")) in found


def test_the_lag_grows_while_a_save_is_on_its_way_and_stays_what_the_last_commit_took(metrics, clock):
    metrics(SaveBegan(1, background=True))
    clock.sleep(40)
    assert read(metrics)[("checkpoint_commit_lag_seconds",)] == 40
    clock.sleep(10)
    metrics(PhaseEnded(1, "a", "commit", 1.0))
    clock.sleep(5)
    metrics(SaveEnded(1, "a", 55.0, None))
    clock.sleep(1000)
    found = read(metrics)
    assert found[("checkpoint_commit_lag_seconds",)] == 50
    assert found[("checkpoint_save_duration_seconds_sum",)] == 55
    assert found[("checkpoint_inprogress_count",)] == 0


def test_a_save_that_hangs_beside_the_next_is_counted(metrics):
    metrics(SaveBegan(1, background=True))
    metrics(SaveBegan(2, background=True))
    metrics(SaveAbandoned("a", 3600.0))
    found = read(metrics)
    assert found[("checkpoint_inprogress_count",)] == 2
    assert found[("checkpoint_saves_abandoned_total",)] == 1


def test_recovery_points_are_ages_and_steps_behind_on_the_rank_that_commits(metrics, clock):
    at = timestamp(clock)
    points = RecoveryPoints("id", Point(9, 90, at), Point(5, 50, at), None)
    metrics(points)
    metrics(Stepped(100))
    assert not [key for key in read(metrics) if "recovery" in key[0]]
    metrics(AttemptBegan("a", "a.t0001", "id"))
    clock.sleep(60)
    found = read(metrics)
    named = {key[1][1]: value for key, value in found.items() if key[0] == "checkpoint_recovery_point_seconds"}
    assert named == {"committed": 60, "verified": 60}
    named = {key[1][1]: value for key, value in found.items() if key[0] == "checkpoint_recovery_point_steps"}
    assert named == {"committed": 10, "verified": 50}
    assert found[("checkpoint_last_committed_step",)] == 90


def test_points_of_another_run_are_none_of_this_ones(metrics, clock):
    """A job resumes, reads a base model before and after its claim, and writes its own run."""
    base = RecoveryPoints("base", Point(900, 9000, timestamp(clock)), Point(900, 9000, timestamp(clock)), None)
    metrics(Resumed("a", 3, 30, 0, 1.0, world_size_changed=False, samples_lost=0, committed_at=timestamp(clock)))
    metrics(base)
    assert read(metrics)[("checkpoint_last_committed_step",)] == 30
    metrics(RecoveryPoints("own", Point(3, 30, timestamp(clock)), None, None))
    metrics(Claimed("own", 4, 2, None))
    metrics(base)
    found = read(metrics)
    assert found[("checkpoint_last_committed_step",)] == 30
    assert [key for key in found if key[0] == "checkpoint_recovery_point_seconds"] == [
        ("checkpoint_recovery_point_seconds", ("against", "committed"))
    ]
    metrics(RecoveryPoints("own", Point(5, 40, timestamp(clock)), None, None))
    assert read(metrics)[("checkpoint_last_committed_step",)] == 40
    metrics(AttemptBegan("a", "a.t0001", "base"))  # the process writes that one now
    assert read(metrics)[("checkpoint_last_committed_step",)] == 9000


def test_the_run_that_is_written_is_found_however_many_are_read(metrics):
    for number in range(1000):
        metrics(RecoveryPoints(f"run-{number}", Point(1, number, "2026-01-02T00:00:00Z"), None, None))
    metrics(AttemptBegan("a", "a.t0001", "run-999"))
    assert read(metrics)[("checkpoint_last_committed_step",)] == 999
    assert len(metrics._told) <= 64


def test_a_base_model_that_is_read_while_a_run_is_written_changes_nothing(metrics):
    own, base = RunLog.create(MemoryStore(), observer=metrics), RunLog.create(MemoryStore())
    simulated.save(own, Incarnation.new(job="own", host="node"), "a", step=3)
    for step in (70, 80):
        simulated.save(base, Incarnation.new(job="base", host="node"), f"b-{step}", step=step)
    RunLog.open(base.store, observer=metrics)
    assert read(metrics)[("checkpoint_last_committed_step",)] == 3


@pytest.mark.parametrize("said", ["yesterday", "2026-01-02T00:00:00", ""])
def test_a_moment_that_is_none_is_left_out_and_the_rest_is_told(metrics, said):
    metrics(AttemptBegan("a", "a.t0001", "own"))
    metrics(RecoveryPoints("own", Point(9, 90, said), Point(5, 50, timestamp(metrics._clock)), None))
    found = read(metrics)
    assert found[("checkpoint_last_committed_step",)] == 90
    assert [key[1:] for key in found if key[0] == "checkpoint_recovery_point_seconds"] == [(("against", "verified"),)]


def test_a_checkpoint_of_a_clock_that_is_ahead_is_of_now(metrics, clock):
    at = timestamp(clock)
    clock.sleep(-30)
    metrics(Resumed("a", 3, None, 0, 1.5, world_size_changed=False, samples_lost=None, committed_at=at))
    found = read(metrics)
    assert found[("checkpoint_recovery_point_seconds", ("against", "committed"))] == 0
    assert not [key for key in found if "steps" in key[0]]
    assert found[("checkpoint_restore_duration_seconds_sum",)] == 1.5


def test_a_resume_is_told_by_what_was_lost_and_how_it_went_on(metrics):
    metrics(RestoreFailed("b", "integrity"))
    metrics(Resumed("a", 3, 7, 2, 1.0, world_size_changed=True, samples_lost=24))
    metrics(ProofEnded("a", 3, "differs", -0.25))
    found = read(metrics)
    assert found[("checkpoint_reprocessed_samples_total",)] == 24
    assert found[("resume_world_size_change_total",)] == 1
    assert found[("resume_loss_delta",)] == -0.25
    assert found[("resume_proofs_total", ("verdict", "differs"))] == 1
    assert found[("checkpoint_restore_failures_total", ("reason", "integrity"))] == 1
    assert not [key for key in found if "recovery" in key[0]]  # it does not commit


def test_events_come_from_many_threads(metrics):
    def save(first):
        for number in range(first, first + 200):
            for event in (
                SaveBegan(number, background=True),
                ShardStored("key", 3, 0.1),
                SaveEnded(number, "a", 1.0, None),
            ):
                metrics(event)

    threads = [threading.Thread(target=save, args=(1000 * at,)) for at in range(8)]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        read(metrics)
    found = read(metrics)
    assert found[("checkpoint_bytes_total",)] == 8 * 200 * 3
    assert found[("checkpoint_save_duration_seconds_count",)] == 8 * 200
    assert found[("checkpoint_inprogress_count",)] == 0


def test_it_is_served_to_this_machine_alone_until_it_is_closed(metrics):
    port = metrics.serve(port=0)
    assert metrics._server.server_address[0] == "127.0.0.1"
    assert scraped(port)[("checkpoint_inprogress_count",)] == 0
    with pytest.raises(InvalidInputError, match="served already"):
        metrics.serve(port=0)
    with pytest.raises(InvalidInputError, match="cannot be listened to"):
        Metrics().serve(port=port)
    metrics.close()
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def test_a_registry_of_the_users_holds_his_metrics_and_these():
    registry = CollectorRegistry()
    Counter("own", "His.", registry=registry).inc()
    metrics = Metrics(registry=registry)
    text = metrics.exposition().decode()
    assert "own_total 1.0" in text
    assert 'checkpoint_inprogress_count{run=""} 0.0' in text


def test_a_file_is_written_at_once_and_again_and_is_never_seen_in_part(metrics, tmp_path):
    path = tmp_path / "ckptstore.prom"
    metrics.write_to(path, every_seconds=0.02)
    assert parsed(path.read_text())[("checkpoint_bytes_total",)] == 0
    done = threading.Event()

    def count():
        while not done.is_set():
            metrics(ShardStored("key", 1, 0.1))

    thread = threading.Thread(target=count)
    thread.start()
    seen = {parsed(path.read_text())[("checkpoint_bytes_total",)] for _ in range(30)}
    done.set()
    thread.join()
    assert len(seen) > 1
    with pytest.raises(InvalidInputError, match="file already"):
        metrics.write_to(path)
    metrics.close()
    assert parsed(path.read_text()) == read(metrics)
    assert [each.name for each in tmp_path.iterdir()] == ["ckptstore.prom"]


def test_a_file_that_cannot_be_written_is_refused_at_once(metrics, tmp_path):
    with pytest.raises(InvalidInputError, match="cannot be written"):
        metrics.write_to(tmp_path / "nowhere" / "ckptstore.prom")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidInputError, match="cannot be written"):
        write_whole(tmp_path / "folder", b"")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("run", [None, 5, "x" * 257, "\ud800", "two\nlines", "two\u2028lines"])
def test_what_cannot_be_a_label_is_refused_at_once(run):
    with pytest.raises(InvalidInputError, match="label"):
        Metrics(run=run)


@pytest.mark.parametrize("port", [-1, 65536, "x", None, True, 1.5])
def test_what_is_no_port_is_refused_and_one_that_is_none_is_named(metrics, port):
    with pytest.raises(InvalidInputError, match="port must be a whole number from 0 to 65535") as refused:
        metrics.serve(port=port)
    assert "port=9464" in refused.value.hint


@pytest.mark.parametrize("address", [None, 5, "", "a\0b", "x" * 100, "not an address"])
def test_what_is_no_address_is_refused(metrics, address):
    with pytest.raises(InvalidInputError) as refused:
        metrics.serve(port=0, address=address)
    assert "address" in refused.value.hint


@pytest.mark.parametrize("path", ["", None])
def test_what_names_no_file_is_refused_at_once_and_another_may_follow(metrics, path, tmp_path):
    with pytest.raises(InvalidInputError, match="must be named by a path"):
        metrics.write_to(path)
    metrics.write_to(tmp_path / "ckptstore.prom")
    metrics.close()


def test_a_registry_is_taken_once(metrics):
    with pytest.raises(InvalidInputError, match="already"):
        Metrics(registry=metrics.registry)
    with pytest.raises(InvalidInputError, match="registry must be CollectorRegistry"):
        Metrics(registry="mine")


def test_a_file_that_cannot_be_written_for_a_while_is_written_again_and_said_once(metrics, tmp_path, caplog):
    path, broken = tmp_path / "ckptstore.prom", threading.Event()
    metrics.registry.register(Broken(broken))
    with caplog.at_level(logging.WARNING, logger="ckptstore.telemetry"):
        metrics.write_to(path, every_seconds=0.01)
        broken.set()
        path.unlink()
        until(lambda: Broken.asked >= 5)
        assert not path.exists()
        broken.clear()
        until(path.exists)
    assert [record.getMessage() for record in caplog.records] == [f"{path} is not written: KeyError: 'a bug'"]


class Broken:
    """A part of the registry that fails while it is told to."""

    asked = 0

    def __init__(self, broken):
        self._broken = broken

    def collect(self):
        if self._broken.is_set():
            Broken.asked += 1
            raise KeyError("a bug")
        return ()


def test_the_file_says_at_the_processs_end_how_it_ended(tmp_path):
    program = (
        "import sys\nfrom ckptstore.telemetry import Metrics\nfrom ckptstore.events import ShardStored\n"
        "metrics = Metrics(run='story')\nmetrics.write_to(sys.argv[1], every_seconds=1000)\n"
        "metrics(ShardStored('key', 7, 0.1))\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "a.prom"], check=True, timeout=60)
    assert parsed((tmp_path / "a.prom").read_text())[("checkpoint_bytes_total",)] == 7


@pytest.mark.parametrize(
    ("make", "module", "extra"), [(Metrics, "prometheus_client", "metrics"), (Spans, "opentelemetry", "otel")]
)
def test_without_the_library_it_says_how_to_get_it(monkeypatch, make, module, extra):
    real = builtins.__import__

    def missing(name, *more):
        if name.partition(".")[0] == module:
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UnsupportedError) as refused:
        make()
    assert refused.value.hint == f"pip install 'ckptstore[{extra}]'"


def test_to_import_it_needs_neither_torch_nor_the_libraries():
    program = (
        "import sys, ckptstore.telemetry\n"
        "print([each for each in ('torch', 'prometheus_client', 'opentelemetry', 'obstore') if each in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert ended.stdout.strip() == "[]"


def test_an_event_that_it_does_not_know_is_none_of_its_business(metrics):
    before = read(metrics)
    tell(metrics, object())
    assert read(metrics) == before


def test_every_metric_of_a_trainer_is_exposed_or_waits_for_its_value(metrics):
    clock = metrics._clock
    metrics(AttemptBegan("a", "a.t0001", "id"))
    metrics(RecoveryPoints("id", Point(9, 90, timestamp(clock)), None, None))
    metrics(Stepped(100))
    metrics(ProofEnded("a", 3, "proved", 0.0))
    names = {key[0] for key in read(metrics)}
    for name, metric in METRICS.items():
        shown = f"{name}_count" if metric.kind == "histogram" else name
        assert (shown in names) == (metric.who != "bucket"), name
