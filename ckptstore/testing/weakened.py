"""Weakened protocols, which the enumeration or the simulation must catch: each shows what its mended line is for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from blake3 import blake3

from ckptstore.errors import AlreadyExistsError, CommitUnknownError, OutcomeUnknownError, UnavailableError
from ckptstore.format.layout import Stem, slot_key
from ckptstore.format.records import Collected
from ckptstore.maintenance import collect, collect_plan, retention
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import PutMode
from ckptstore.protocol import attempt, claim, commit, fold, log, once, retirement, verify_data
from ckptstore.protocol.fold import Fold
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.once import Outcome
from ckptstore.testing.enumeration import enumerations
from ckptstore.testing.simulation import play

Patch = Callable[[Any, str, Any], None]
Weakening = Callable[[Patch], None]


def no_read_back(patch: Patch) -> None:
    """'Already exists' is taken for a lost race."""
    right = once.create_once

    def create_once(store: Any, key: str, body: bytes, **given: Any) -> Any:
        try:
            store.put(key, body, mode=PutMode.CREATE)
        except AlreadyExistsError as error:
            raise UnavailableError("somebody else was first") from error
        except OutcomeUnknownError:
            return right(store, key, body, **given)
        return Outcome.CREATED, body

    patch(log, "create_once", create_once)


def clean_up_on_time_out(patch: Patch) -> None:
    """A commit whose outcome is unknown is taken for failed, and its data are deleted."""
    right = commit.append_commit

    def append_commit(run_log: RunLog, incarnation: Any, record: Any, **given: Any) -> Any:
        try:
            return right(run_log, incarnation, record, **given)
        except CommitUnknownError:
            for info in list(run_log.store.list("data/")):
                if record.prefix in info.key:
                    run_log.store.delete(info.key)
            raise

    patch(commit, "append_commit", append_commit)


def no_fence(patch: Patch) -> None:
    """A newer claim stops nobody."""
    patch(Fold, "fences", lambda *_: False)


def no_supersede(patch: Patch) -> None:
    """An attempt may commit after a later one."""
    patch(Fold, "supersedes", lambda *_: False)


def no_revalidate(patch: Patch) -> None:
    """Who meets another's record sends the same one to the next slot."""
    right = RunLog.append

    def append(self: RunLog, decide: Any, **given: Any) -> Any:
        decisions: list[Any] = []

        def decide_once(fold: Fold) -> Any:
            decisions.append(decide(fold) if not decisions else decisions[0])
            return decisions[0]

        return right(self, decide_once, **given)

    patch(RunLog, "append", append)


def a_claim_per_writer(patch: Patch) -> None:
    """Each writer object begins a reign of its own."""
    patch(claim, "reigns", lambda *_: False)


def latest_by_step(patch: Patch) -> None:
    """The latest checkpoint is the one with the highest step."""

    def newest(fold: Fold) -> Any:
        return max(fold.selectable, key=lambda each: each.commit.global_step or 0, default=None)

    patch(Fold, "newest", property(newest))


def bodies_rebuilt(patch: Patch) -> None:
    """A record is made anew for every try."""
    right, tries = once._send, dict[tuple[str, bytes], int]()

    def send(store: Any, key: str, body: bytes, options: Any) -> bool:
        tries[key, body] = tries.get((key, body), 0) + 1
        if tries[key, body] > 1 and key.startswith("log/"):
            value = {**json.loads(body), "written_at": f"try {tries[key, body]}"}
            del value["self"]
            head = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()[:-1]
            body = head + b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n'
        return right(store, key, body, options)

    patch(once, "_send", send)


def commit_before_the_parts(patch: Patch) -> None:
    """The commit is appended before all is stored that it names."""
    put_part, right, later = commit._put_part, commit.append_commit, list[Any]()

    def append_commit(run_log: RunLog, *given: Any, **more: Any) -> Any:
        appended = right(run_log, *given, **more)
        for part in [part for part in later if part[0] is run_log]:
            later.remove(part)
            put_part(*part)
        return appended

    patch(commit, "_put_part", lambda *given: later.append(given))
    patch(commit, "verify_stored", lambda *_: None)
    patch(commit, "append_commit", append_commit)


def records_deleted(patch: Patch) -> None:
    """A record that a snapshot or a later commit stands for is deleted."""
    right = commit._write_hints

    def write_hints(run_log: RunLog, committed: Any, body: Any) -> None:
        right(run_log, committed, body)
        run_log.store.delete(slot_key(max(0, committed.seq - 5)))

    patch(commit, "_write_hints", write_hints)


def named_by_hash(patch: Patch) -> None:
    """A data key has no nonce: the hash of the checkpoint's name stands in its place."""
    right = Stem

    def stem(name: str, term: int, number: int, _: str) -> Stem:
        return right(name, term, number, blake3(name.encode()).hexdigest()[:32])

    patch(attempt, "Stem", stem)


def orphans_of_the_live_term(patch: Patch) -> None:
    """What has no commit is an orphan, whoever may still commit it."""
    patch(collect_plan, "is_orphan", lambda *_: True)


def pins_unchecked(patch: Patch) -> None:
    """A pin that came in before the slot stops no RETIRE: neither who decides nor who folds looks at it."""

    def unpinned(of: Fold) -> Fold:
        return replace(of, commits={seq: replace(each, pins=()) for seq, each in of.commits.items()})

    refusals, retirable = retirement.refusals, retention.retirable
    for module in (fold, collect):
        patch(module, "refusals", lambda of, seqs: refusals(unpinned(of), seqs))
    for module in (collect, collect_plan):
        patch(module, "retirable", lambda of, keep: retirable(unpinned(of), keep))


def newest_unprotected(patch: Patch) -> None:
    """The newest may be retired."""
    right = retirement.refusals

    def refusals(of: Fold, seqs: Sequence[int]) -> list[retirement.Refusal]:
        newest = of.newest
        if newest is None or newest.seq not in seqs or len(of.selectable) <= len(seqs) + 1:
            return right(of, seqs)
        return []

    for module in (fold, collect):
        patch(module, "refusals", refusals)


def one_is_enough(patch: Patch) -> None:
    """One checkpoint may be all that is left."""
    for module in (retirement, retention):
        patch(module, "MIN_KEEP", 1)


def deleted_before_retired(patch: Patch) -> None:
    """Bytes go first, and RETIRE says so later."""
    right = collect._retire_as_shown

    def retire(run_log: RunLog, shown: Any, *given: Any) -> list[int]:
        for seq in shown:
            for info in collect_plan.keys_under(run_log.store, run_log.fold.commits[seq].commit.prefix):
                run_log.store.delete(info.key)
        return right(run_log, shown, *given)

    patch(collect, "_retire_as_shown", retire)


def gone_before_deleted(patch: Patch) -> None:
    """COLLECTED is written before the bytes are gone."""
    right = collect._delete

    def delete(run_log: RunLog, *given: Any, **more: Any) -> None:
        run_log.append(lambda of: Collected(tuple(sorted(of.retired))) if of.retired else None)
        right(run_log, *given, **more)

    patch(collect, "_delete", delete)


def another_plan_applied(patch: Patch) -> None:
    """What is applied is planned anew, whatever was shown."""
    right = collect.collect

    def apply(run_log: RunLog, *, digest: str, **given: Any) -> Any:
        del digest
        again = {name: given[name] for name in ("keep", "grace_seconds") if name in given}
        return right(run_log, digest=collect_plan.plan_collection(run_log, **again).digest, **given)

    patch(collect, "collect", apply)


def foreign_deleted(patch: Patch) -> None:
    """What this run's writers never spell is taken for garbage."""
    right = collect._delete

    def delete(run_log: RunLog, deletions: Any, report: Any, **more: Any) -> None:
        right(run_log, deletions, report, **more)
        for key in report.plan.foreign:
            run_log.store.delete(key)

    patch(collect, "_delete", delete)


def sizes_are_enough(patch: Patch) -> None:
    """A verification of every byte believes the sizes."""
    patch(verify_data, "verify_shards", lambda *_, **__: {})


@dataclass(frozen=True, slots=True)
class Weakened:
    """A weakened protocol, and who must catch it.

    Args:
        weaken: Weakens it.
        invariant: Which one it breaks.
        enumeration: The enumeration that catches it; None: the simulation does.
    """

    weaken: Weakening
    invariant: str
    enumeration: str | None = None

    @property
    def name(self) -> str:
        """What it is called, and by whom it is caught."""
        return f"{self.weaken.__name__}, {self.enumeration or 'simulation'}"

    def caught(self, seeds: range = range(200)) -> str | None:
        """Return what caught it: the seed, or the place in the enumeration; None if nothing did."""
        with weakened(self.weaken):
            if self.enumeration is not None:
                found = enumerations()[self.enumeration](MemoryStore)
                return next((each for each in found if each.startswith(f"{self.invariant}:")), None)
            for seed in seeds:
                for complaint in play(seed).complaints:
                    if complaint.startswith(f"{self.invariant}:"):
                        return f"seed {seed}: {complaint}"
        return None


@contextlib.contextmanager
def weakened(weaken: Weakening) -> Iterator[None]:
    """Weaken the protocol for a while."""
    with contextlib.ExitStack() as stack:
        weaken(lambda target, name, value: stack.enter_context(mock.patch.object(target, name, value)))
        yield


WEAKENED = (
    Weakened(no_read_back, "I5", "each fault"),
    Weakened(clean_up_on_time_out, "I11", "each outage"),
    Weakened(no_fence, "I3", "each intrusion"),
    Weakened(no_supersede, "I7", "each outage"),
    Weakened(no_revalidate, "I3", "each intrusion"),
    Weakened(no_revalidate, "I11", "roll-back, each intrusion"),
    Weakened(a_claim_per_writer, "I15", "many writers"),
    Weakened(latest_by_step, "I11", "roll-back, each fault"),
    Weakened(bodies_rebuilt, "I1", "single writer"),
    Weakened(commit_before_the_parts, "I11", "each death"),
    Weakened(commit_before_the_parts, "I11", "single writer, each death"),
    Weakened(no_read_back, "I5"),
    Weakened(clean_up_on_time_out, "I7"),
    Weakened(no_fence, "I3"),
    Weakened(no_revalidate, "I3"),
    Weakened(a_claim_per_writer, "I15"),
    Weakened(records_deleted, "I1"),
    Weakened(named_by_hash, "I6"),
    Weakened(latest_by_step, "I11"),
    Weakened(commit_before_the_parts, "I4"),
    Weakened(pins_unchecked, "I14"),
    Weakened(newest_unprotected, "I14"),
    Weakened(one_is_enough, "I14"),
    Weakened(orphans_of_the_live_term, "I7"),
    Weakened(deleted_before_retired, "I8"),
    Weakened(gone_before_deleted, "I8"),
    Weakened(another_plan_applied, "I17"),
    Weakened(foreign_deleted, "I8"),
    Weakened(sizes_are_enough, "I13"),
)
"""All of them. A protocol that two catch stands here twice."""
