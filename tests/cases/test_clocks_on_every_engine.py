"""Clocks that are wrong: nothing is decided by them, and a server that minds is understood."""

import time
from datetime import datetime, timedelta

import botocore.auth
import pytest
import torch
from places import EVERY, on
from refusals import COMMANDS, LOADS, SAVES, command, command_told, told
from states import blank, same

import storage_writers as sw
from ckptstore import clock
from ckptstore.errors import AccessDeniedError
from ckptstore.options import LogOptions
from localstack.faults import s3_error

HOURS = [0, 2, -2, 1.5, 1, 0.5, -2.5]
"""By how much the clock is off at each save; it goes back again and again."""


def state(value):
    return {"w": torch.full((8,), float(value)), "step": value}


def set_off(monkeypatch, hours):
    """Let this machine's clock be off by so much, for all that asks it in Python."""
    real = time.time

    class Off(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(hours=hours)

    monkeypatch.setattr(clock, "datetime", Off)
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)


@on(*EVERY)
def test_the_latest_is_what_was_committed_last_whatever_the_clock_said(place, monkeypatch):
    for step, hours in enumerate(HOURS):
        with monkeypatch.context() as patch:
            set_off(patch, hours)
            sw.save(state(step), checkpoint_id=f"step-{step}", storage_writer=place.probed().writer())
            for later in (0, 24, -24):
                set_off(patch, later)
                assert place.opened().latest().checkpoint_id == f"step-{step}"
        found = blank(state(step))
        sw.load(found, storage_reader=place.reader())
        assert same(found, state(step))
    checkpoints = place.opened().checkpoints()
    said = [each.committed_at for each in checkpoints]
    assert [each.checkpoint_id for each in checkpoints] == [f"step-{step}" for step in reversed(range(len(HOURS)))]
    assert sorted(said, reverse=True) != said  # the clock did say otherwise
    listed = command("ls", place.url, *place.arguments)[1]["committed"]
    assert [each["seq"] for each in listed] == list(range(len(HOURS), 0, -1))
    assert command("latest", place.url, *place.arguments)[1]["checkpoint"]["seq"] == len(HOURS)


def check_that_all_faces_name_the_clock(place):
    writer = {"storage_writer": place.writer(log=LogOptions(deadline_seconds=1))}
    faces = [lambda call=call: SAVES[call](state(2), checkpoint_id="b", **writer) for call in SAVES]
    faces += [lambda call=call: LOADS[call](state(0), storage_reader=place.reader()) for call in LOADS]
    for face in [*faces, lambda: place.opened().latest()]:
        error = told(face, AccessDeniedError, "RequestTimeTooSkewed")
        assert "clock is off" in error.hint
    for name in ("ls", "latest", "verify"):
        more = [*COMMANDS[name][1:], *place.arguments]
        document = command_told(name, place.url, *more, kind=AccessDeniedError, names=("RequestTimeTooSkewed",))
        assert "clock is off" in document["hint"]


@on("obstore-seaweedfs", "obstore-moto", "s3fs-seaweedfs", "s3fs-moto")
def test_a_server_that_minds_the_clock_is_understood_by_every_face(place, proxied):
    """Google looks at tokens, Azure says only that it does not believe the signature."""
    sw.save(state(1), checkpoint_id="a", storage_writer=place.probed().writer())
    proxy = proxied(place.server)
    with proxy.rule(s3_error(403, "RequestTimeTooSkewed")):
        check_that_all_faces_name_the_clock(place.through(proxy.endpoint))
    assert [each.checkpoint_id for each in place.opened().checkpoints()] == ["a"]


@pytest.mark.parametrize("hours", [2, -2])
@on("s3fs-seaweedfs")
def test_a_server_does_mind_a_clock_that_is_off_by_hours(place, hours, monkeypatch):
    """obstore signs with a clock that no test can move; moto does not look."""
    sw.save(state(1), checkpoint_id="a", storage_writer=place.probed().writer())
    real = botocore.auth.get_current_datetime

    def off(*given, **named):
        return real(*given, **named) + timedelta(hours=hours)

    with monkeypatch.context() as patch:
        patch.setattr(botocore.auth, "get_current_datetime", off)
        check_that_all_faces_name_the_clock(place)
    assert [each.checkpoint_id for each in place.opened().checkpoints()] == ["a"]
