"""A resume for training claims the run before it looks what is there; nothing else that reads does."""

import itertools
import signal

import pytest
from stoppable import Job, Plan, Tiny

import storage_writers as sw
from ckptstore import CheckpointStore
from ckptstore.errors import ConflictError
from ckptstore.training import Checkpointer, flow, resume

_runs = itertools.count()


@pytest.fixture
def url():
    return f"memory://claims-{next(_runs)}"


def kinds(url):
    return [entry.record.KIND for entry in CheckpointStore.open(url).records()]


def trained(url, saves, **options):
    tiny = Tiny()
    sw.begin_incarnation(url)
    with Checkpointer(url, tiny.state, background=False, proof_steps=0, **options) as checkpointer:
        for _ in range(saves):
            tiny.step()
            checkpointer.save()


def test_a_stopped_job_that_wakes_while_another_one_loads_commits_nothing_above_its_claim(tmp_path, monkeypatch):
    url = str(tmp_path / "run")  # I15
    ghost = Job(Plan(url, until=10_000, step_seconds=0.02))
    ghost.await_word(("step", 4))  # it has saved at step 3
    while not CheckpointStore.open(url).checkpoints():
        ghost.await_word("step")
    ghost.send(signal.SIGSTOP)
    real, codes = flow.sw.load, []

    def load(*given, **named):
        ghost.send(signal.SIGCONT)
        codes.extend(ghost.end())
        return real(*given, **named)

    monkeypatch.setattr(flow.sw, "load", load)
    tiny = Tiny()
    with Checkpointer(url, tiny.state, background=False, proof_steps=0) as checkpointer:
        report = checkpointer.resume()
        assert codes == [1]  # it ended by itself
        store = CheckpointStore.open(url)
        assert store.latest().seq == report.seq < store.reign.seq
        tiny.step()
        checkpointer.save()
    entries = [(entry.envelope.seq, entry.record) for entry in CheckpointStore.open(url).records()]
    above = [record for seq, record in entries if seq > store.reign.seq and record.KIND == "COMMIT"]
    assert [(record.term, record.parent) for record in above] == [(store.reign.term, report.seq)]


def test_a_fresh_run_is_claimed_and_the_first_save_claims_nothing_more(url):
    tiny = Tiny()
    with Checkpointer(url, tiny.state, background=False, proof_steps=0) as checkpointer:
        assert checkpointer.resume().is_fresh
        assert kinds(url) == ["CLAIM"]
        assert checkpointer.resume().is_fresh
        tiny.step()
        checkpointer.save()
    assert kinds(url) == ["CLAIM", "COMMIT"]


def test_the_run_that_is_begun_from_is_not_claimed_and_a_plain_resume_writes_nothing(url):
    source = f"{url}-source"
    trained(source, 1)
    resume(Tiny().state, source)
    assert kinds(source) == ["CLAIM", "COMMIT"]
    with Checkpointer(url, Tiny().state, proof_steps=0) as checkpointer:
        checkpointer.resume(source=source)
    assert kinds(source) == ["CLAIM", "COMMIT", "PIN"]
    assert kinds(url) == ["CLAIM"]


def test_a_job_that_may_not_take_over_is_refused_before_it_loads(url):
    trained(url, 1, job="one")
    sw.begin_incarnation(url)
    tiny = Tiny(1)
    before = tiny.model.weight.detach().clone()
    with (
        Checkpointer(url, tiny.state, job="two", takeover="same_job", proof_steps=0) as checkpointer,
        pytest.raises(ConflictError, match="'one'"),
    ):
        checkpointer.resume()
    assert kinds(url) == ["CLAIM", "COMMIT"]
    assert tiny.model.weight.equal(before)
