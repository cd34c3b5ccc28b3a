"""What a resume passes over: damage that was read twice, and nothing that was read once or is only called another."""

import itertools
from dataclasses import replace

import pytest
from stoppable import Tiny

from ckptstore import CheckpointStore, store
from ckptstore.errors import ResumeError, UnavailableError
from ckptstore.format.layout import slot_key
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.training import Checkpointer, resume

_runs = itertools.count()


@pytest.fixture
def url():
    url = f"memory://doubtful-{next(_runs)}"
    tiny = Tiny()
    with Checkpointer(url, tiny.state, background=False, proof_steps=0) as checkpointer:
        for _ in range(3):
            tiny.step()
            checkpointer.save()
    return url


class Lists(ForwardingStore):
    """Leaves out data from as many listings as it is told."""

    def __init__(self, inner, omissions):
        super().__init__(inner)
        self._omissions = omissions

    def list(self, prefix, **named):
        found = super().list(prefix, **named)
        omits = prefix.startswith("data/") and next(self._omissions, False)
        return iter(()) if omits else found


class Garbles(ForwardingStore):
    """Damages the log's first record on its way, at those readings of it that it is told."""

    def __init__(self, inner, damages):
        super().__init__(inner)
        self._damages = damages

    def get(self, key, *, max_bytes):
        body = super().get(key, max_bytes=max_bytes)
        return body[::-1] if key == slot_key(0) and next(self._damages, False) else body


class Renames(ForwardingStore):
    """Says of all data that they are others than those that were written."""

    def __init__(self, inner, _):
        super().__init__(inner)

    def list(self, prefix, **named):
        return (replace(info, etag="another") for info in super().list(prefix, **named))


def opened_as(monkeypatch, kind, turns):
    turns = iter(turns)
    monkeypatch.setattr(store, "open_store", lambda *given, **named: kind(open_store(*given, **named), turns))


@pytest.mark.parametrize("omissions", [[True], [True, True]], ids=["once", "twice"])
def test_what_listings_alone_leave_out_is_loaded(url, monkeypatch, omissions):
    opened_as(monkeypatch, Lists, omissions)
    report = resume(Tiny().state, url)
    assert (report.global_step, report.passed_over) == (3, ())


def test_a_log_that_one_reading_alone_found_damaged_is_gone_on_from(url, monkeypatch):
    opened_as(monkeypatch, Garbles, [False, True])  # it is opened, and then verified
    report = resume(Tiny().state, url)
    assert (report.global_step, report.passed_over) == (3, ())


def test_a_log_that_two_readings_found_damaged_is_not(url, monkeypatch):
    opened_as(monkeypatch, Garbles, [False, True, *[False, True, True] * 3])
    with pytest.raises(ResumeError, match="None of the 3"):
        resume(Tiny().state, url)


def test_what_the_store_only_calls_rewritten_is_loaded(url, monkeypatch):
    opened_as(monkeypatch, Renames, [])
    verdict = CheckpointStore.open(url).verify("step-3", level="etag")
    assert {each.kind for each in verdict.findings} == {"rewritten"}
    report = resume(Tiny().state, url, level="etag")
    assert (report.global_step, report.passed_over) == (3, ())


def test_what_cannot_be_asked_after_a_resume_does_not_undo_it(url, monkeypatch):
    def unavailable(*given, **named):
        raise UnavailableError("not now")

    monkeypatch.setattr(CheckpointStore, "checkpoints", unavailable)
    tiny = Tiny()
    report = resume(tiny.state, url, step=2)
    assert (report.global_step, tiny.progress.global_step, report.samples_lost) == (2, 2, None)
