"""Each fault at each store call of small histories: the protocol stands, and each weakened one is caught."""

from __future__ import annotations

import itertools
import json

import pytest
from blake3 import blake3

from ckptstore.errors import AlreadyExistsError, CommitUnknownError
from ckptstore.objectstore.local import LocalStore
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import PutMode
from ckptstore.protocol import claim, commit, log
from ckptstore.protocol.fold import Fold
from ckptstore.protocol.log import Outcome, RunLog
from ckptstore.testing.enumeration import enumerations


@pytest.mark.parametrize("name", enumerations())
def test_no_fault_at_any_call_breaks_an_invariant(name):
    """I1, I2, I3, I4, I5, I6, I7, I10, I11, I15, I16: see `ckptstore.testing.reference`."""
    assert list(enumerations()[name](MemoryStore)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["each fault", "each death", "each outage", "each intrusion"])
def test_files_pass_the_same_enumerations(name, tmp_path):
    """I1, I2, I3, I4, I5, I6, I7, I11, I16."""
    numbers = itertools.count()
    assert list(enumerations()[name](lambda: LocalStore(str(tmp_path / f"{next(numbers)}")))) == []


def no_read_back(patch):
    """'Already exists' is taken for a lost race."""
    right = log.create_once

    def create_once(store, key, body, **given):
        try:
            store.put(key, body, mode=PutMode.CREATE)
        except AlreadyExistsError as error:
            raise log.UnavailableError("somebody else was first") from error
        except log.OutcomeUnknownError:
            return right(store, key, body, **given)
        return Outcome.CREATED, body

    patch.setattr(log, "create_once", create_once)


def clean_up_on_time_out(patch):
    """A commit whose outcome is unknown is taken for failed, and its data are deleted."""
    right = commit.append_commit

    def append_commit(run_log, incarnation, record, **given):
        try:
            return right(run_log, incarnation, record, **given)
        except CommitUnknownError:
            for info in list(run_log.store.list("data/")):
                if record.prefix in info.key:
                    run_log.store.delete(info.key)
            raise

    patch.setattr(commit, "append_commit", append_commit)


def no_fence(patch):
    """A newer claim stops nobody."""
    patch.setattr(Fold, "fences", lambda *_: False)


def no_supersede(patch):
    """An attempt may commit after a later one."""
    patch.setattr(Fold, "supersedes", lambda *_: False)


def no_revalidate(patch):
    """Who meets another's record sends the same one to the next slot."""
    right = RunLog.append

    def append(self, decide, **given):
        decisions = []

        def decide_once(fold):
            decisions.append(decide(fold) if not decisions else decisions[0])
            return decisions[0]

        return right(self, decide_once, **given)

    patch.setattr(RunLog, "append", append)


def a_claim_per_writer(patch):
    """Each writer object begins a reign of its own."""
    patch.setattr(claim, "reigns", lambda *_: False)


def latest_by_step(patch):
    """The latest checkpoint is the one with the highest step."""
    newest = property(lambda fold: max(fold.selectable, key=lambda each: each.commit.global_step, default=None))
    patch.setattr(Fold, "newest", newest)


def bodies_rebuilt(patch):
    """A record is made anew for every try."""
    right, tries = log._send, {}

    def send(store, key, body, options):
        tries[key, body] = tries.get((key, body), 0) + 1
        if tries[key, body] > 1 and key.startswith("log/"):
            value = {**json.loads(body), "written_at": f"try {tries[key, body]}"}
            del value["self"]
            head = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()[:-1]
            body = head + b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n'
        return right(store, key, body, options)

    patch.setattr(log, "_send", send)


def commit_before_the_parts(patch):
    """The commit is appended before all is stored that it names."""
    put_part, right, later = commit._put_part, commit.append_commit, []

    def append_commit(run_log, *given, **more):
        appended = right(run_log, *given, **more)
        for part in [part for part in later if part[0] is run_log]:
            later.remove(part)
            put_part(*part)
        return appended

    patch.setattr(commit, "_put_part", lambda *given: later.append(given))
    patch.setattr(commit, "verify_stored", lambda *_: None)
    patch.setattr(commit, "append_commit", append_commit)


WEAKENED = [
    (no_read_back, "each fault", "I5"),
    (clean_up_on_time_out, "each outage", "I11"),
    (no_fence, "each intrusion", "I3"),
    (no_supersede, "each outage", "I7"),
    (no_revalidate, "each intrusion", "I3"),
    (no_revalidate, "roll-back, each intrusion", "I11"),
    (a_claim_per_writer, "many writers", "I15"),
    (latest_by_step, "roll-back, each fault", "I11"),
    (bodies_rebuilt, "single writer", "I1"),
    (commit_before_the_parts, "each death", "I11"),
    (commit_before_the_parts, "single writer, each death", "I11"),
]


@pytest.mark.parametrize(
    ("weaken", "name", "invariant"), WEAKENED, ids=[f"{weaken.__name__}, {name}" for weaken, name, _ in WEAKENED]
)
def test_the_same_enumeration_catches_each_weakened_protocol(weaken, name, invariant, monkeypatch):
    weaken(monkeypatch)
    found = next((each for each in enumerations()[name](MemoryStore) if each.startswith(f"{invariant}:")), None)
    assert found is not None
