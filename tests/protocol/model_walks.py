"""The bounded model and the code, side by side: the same records, the same walks, the same answers."""

from __future__ import annotations

import contextlib
import random

from benchmarks.commit_model import records as model
from benchmarks.commit_model.explore import successors
from benchmarks.commit_model.state import Budget, Setting, Writer
from benchmarks.commit_model.state import first as first_state
from ckptstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CkptStoreError,
    CommitUnknownError,
    FencedError,
    OutcomeUnknownError,
    SupersededError,
    UnavailableError,
)
from ckptstore.format.codec import PartRef
from ckptstore.format.layout import Stem, parse_slot
from ckptstore.format.records import (
    Claim,
    Collected,
    Commit,
    Pin,
    Restore,
    Retire,
    SetAside,
    ShardTotals,
    Unpin,
    Verified,
)
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.catalog import Catalog
from ckptstore.protocol.claim import Incarnation, claim
from ckptstore.protocol.commit import commit
from ckptstore.protocol.fold import rejection
from ckptstore.protocol.log import RunLog
from ckptstore.testing import simulated
from ckptstore.testing.simulated import CountedIds, ManualClock
from ckptstore.testing.tapped import TappedStore

OFTEN = 99
SETTING = Setting(
    writers=4,
    saves=3,
    slots=OFTEN,
    again=True,
    budget=Budget(unknowns=OFTEN, refusals=OFTEN, torn=OFTEN, rollbacks=OFTEN, trainer_retires=OFTEN),
)


def incarnation(author):
    return f"{author:032x}"


def real_record(record):
    """Return what the code writes for a record of the model."""
    first = next(iter(record.seqs), 0)
    made = {
        "CLAIM": lambda: Claim(record.term, incarnation(record.author), "job", "host"),
        "COMMIT": lambda: _real_commit(record),
        "SET_ASIDE": lambda: SetAside(record.seqs, record.word),
        "RESTORE": lambda: Restore(record.seqs),
        "RETIRE": lambda: Retire(record.seqs, "old", record.term or None),
        "COLLECTED": lambda: Collected(record.seqs),
        "PIN": lambda: Pin(first, record.word, "read"),
        "UNPIN": lambda: Unpin(first, record.word),
        "VERIFIED": lambda: Verified(first, "full"),
    }
    return made[record.kind]()


def _real_commit(record):
    stem = Stem("x", record.term, record.number, incarnation(record.author))
    return Commit(
        checkpoint_id="x",
        global_step=record.step,
        term=record.term,
        attempt=record.number,
        parent=record.parent,
        prefix=str(stem),
        saved_world_size=1,
        parallelism={},
        training_state={},
        fingerprints={},
        metrics={},
        tags=(),
        shards=ShardTotals(1, 1),
        parts=(PartRef(stem.part_key(0), 1, "0" * 64, 1, (0, 0)),),
        documents=None,
        software={},
    )


def random_record(rng, fold):
    """Return a record that is valid now, or nearly so."""
    kind = rng.choice(
        ["CLAIM", *["COMMIT"] * 6, "SET_ASIDE", "RESTORE", "RETIRE", "RETIRE", "COLLECTED", "PIN", "UNPIN", "VERIFIED"]
    )
    author = rng.randrange(3)
    if kind == "CLAIM":
        return model.Record(kind, author, term=max(0, fold.term + rng.choice([0, 1, 1, 1, 3])))
    if kind == "COMMIT":
        term = max(0, fold.term - (rng.random() < 0.1) + (rng.random() < 0.05))
        number = max(1, (fold.tip[1] if fold.tip else 0) + rng.choice([-1, 0, 1, 1, 1, 2]))
        parent = rng.choice([None, *range(fold.end), *([fold.end] if rng.random() < 0.1 else [])])
        return model.Record(kind, author, term=term, number=number, parent=parent, step=1)
    seqs = [each.seq for each in fold.kept] + [seq for seq, _ in fold.retired] * (1 + 5 * (kind == "COLLECTED"))
    seqs = seqs if seqs and rng.random() < 0.95 else [*seqs, fold.end]
    many = kind in ("SET_ASIDE", "RESTORE", "RETIRE", "COLLECTED")
    chosen = tuple(sorted({rng.choice(seqs) for _ in range(rng.choice([1, 1, 2]) if many else 1)}))
    word = {"SET_ASIDE": rng.choice(["quarantined", "abandoned"]), "PIN": rng.choice("ab"), "UNPIN": rng.choice("ab")}
    term = rng.choice([0, 0, fold.term, max(0, fold.term - 1)]) if kind == "RETIRE" else 0
    return model.Record(kind, author, term=term, seqs=chosen, word=word.get(kind, ""))


def told(fold, owner_of):
    """Return what the code's fold says, in the model's words; `owner_of` knows whose a stem is."""

    def attempt(prefix):
        stem = Stem.parse(prefix)
        return model.Attempt(stem.term, stem.attempt, owner_of(stem))

    kept = tuple(
        model.Kept(
            each.seq,
            attempt(each.commit.prefix),
            0,
            each.set_aside or "",
            tuple(pin.holder for pin in each.pins),
            each.verified == "full",
        )
        for each in fold.kept
    )
    return model.Fold(
        end=fold.end,
        term=fold.term,
        claimant=int(fold.claim.incarnation, 16) if fold.claim else -1,
        reigns=tuple(sorted((int(who, 16), term) for who, term in fold.reigns.items())),
        tip=(fold.tip.seq, fold.tip.attempt) if fold.tip else None,
        kept=kept,
        retired=tuple(sorted((seq, attempt(prefix)) for seq, prefix in fold.retired.items())),
        ever=fold.ever_committed,
        ignored=tuple(each.seq for each in fold.ignored),
    )


def without_steps(fold):
    """Return the model's fold without what the code's has no word for."""
    return fold._replace(kept=tuple(each._replace(step=0) for each in fold.kept))


class Strayed(BaseException):
    """The code did what the model cannot. No handler under test can swallow it."""


class Walker:
    """A job of the code, whose every send to the log the walk decides about."""

    def __init__(self, walk, number):
        self.walk, self.number, self.silent, self.tries = walk, number, False, 0
        self.store = TappedStore(walk.store, self._tap)
        self.ids = CountedIds(f"{number + 1:x}")
        self.incarnation = Incarnation(incarnation(number), job="job", host="host")
        self.unknown = None
        self._log = None

    @property
    def log(self):
        if self._log is None:
            options = LogOptions(deadline_seconds=1)
            self._log = RunLog.create(self.store, clock=ManualClock(), ids=self.ids, options=options)
        return self._log

    @property
    def state(self):
        return self.walk.state.writers[self.number]

    def _tap(self, call, act):
        if not call.key.startswith("log/"):
            return act()
        if self.silent:
            raise UnavailableError("Nobody answers.")
        slot = parse_slot(call.key) if call.operation == "put" else None
        if slot is None or slot < self.walk.state.log.end:
            return act()
        return self.walk.decide(self, slot, act)

    def act(self):
        """Do what is next in the model, in the code too; let the model follow what came of it."""
        what = getattr(self, "_" + self.state.at.replace(" ", "_"))
        try:
            what()
        except (FencedError, SupersededError, CommitUnknownError, AccessDeniedError) as error:
            self.silent = False
            self._follow(error)
        self.silent = False

    def _follow(self, error):
        words = {
            FencedError: ["is fenced"],
            # the code may decide before it has read a claim that the model knows: both say no
            SupersededError: ["is told superseded", "is told that it was retired", "is fenced"],
            CommitUnknownError: ["unknown", "told unknown"],
            AccessDeniedError: ["refused", "reported failed"],
        }
        ends = words[type(error)]
        if self.state.at == "dead" and isinstance(error, FencedError):
            return
        self.walk.take(self, lambda label: label[1] in ends or label[-1] in ends)

    def _new(self):
        claim(self.log, self.incarnation)
        self.walk.take(self, lambda label: label[1] == "reigns" or label[-1] == "landed")

    def _selecting(self):
        rng, fold = self.walk.rng, self.walk.state.log.fold
        if fold.newest is None:
            self.walk.take(self, lambda label: label[1] == "starts fresh")
            return
        catalog = Catalog(self.log)
        assert catalog.latest().seq == fold.newest.seq
        if len(fold.selectable) > 1 and rng.random() < 0.3:
            target = rng.choice(fold.selectable[:-1]).seq
            above = [each.seq for each in fold.selectable if each.seq > target]
            self.walk.expected = lambda record: record.kind == "SET_ASIDE" and list(record.seqs) == above
            catalog.rollback(target)
        else:
            self.tries += 1
            self.walk.expected = lambda record: record.kind == "PIN"
            catalog.pin(fold.newest.seq, holder=f"writer {self.number}", reason=f"try {self.tries}")
        self.walk.take(self, lambda label: label[-1] == "landed")

    def _loading(self):
        committed = Catalog(self.log).find(seq=self.state.loaded)
        assert simulated.load(Catalog(self.log), committed).size > 0
        self.incarnation.loaded = committed.seq
        self.walk.take(self, lambda label: label[1] == "has loaded")

    def _idle(self):
        state, fold, rng = self.state, self.walk.state.log.fold, self.walk.rng
        if self.unknown is not None and state.unknown is not None and rng.random() < 0.4:
            self._commit(*self.unknown)
        elif state.term == fold.term and rng.random() < 0.25 and self._retired():
            return
        elif state.number < SETTING.saves:
            attempt = begin(self.log, self.incarnation, checkpoint_id="x", world_size=2)
            self.walk.owners[str(attempt.stem)] = self.number
            ranks = 1 if rng.random() < 0.15 else 2
            shards = [simulated.upload(self.store, attempt, rank) for rank in range(ranks)]
            if ranks == 1:
                self.walk.take(self, lambda label: label[1] == "uploads a half of")
                return
            self._commit(attempt, shards)
        elif state.term < fold.term:
            begin(self.log, self.incarnation, checkpoint_id="x", world_size=2)

    def _commit(self, attempt, shards):
        key = (attempt.stem.term, attempt.stem.attempt, self.number)
        self.walk.expected = lambda record: record.kind == "COMMIT" and tuple(record.attempt) == key
        try:
            commit(self.log, self.incarnation, attempt, shards, options=simulated.OPTIONS)
        except CommitUnknownError:
            self.unknown = (attempt, shards)
            raise
        except CkptStoreError:
            self.unknown = None if self.unknown and self.unknown[0] == attempt else self.unknown
            raise
        self.unknown = None if self.unknown and self.unknown[0] == attempt else self.unknown
        self.walk.take(
            self, lambda label: label[-1] == "landed" or (label[1] == "finds committed" and tuple(label[2]) == key)
        )

    def _retired(self):
        term = self.state.term
        seqs = [each.seq for each in self.walk.state.log.fold.kept]
        seqs = [seq for seq in seqs if self._rejection(seq) is None]
        if not seqs:
            return False
        record = Retire((self.walk.rng.choice(seqs),), "old", term)
        self.walk.expected = lambda sent: sent.kind == "RETIRE" and sent.seqs == record.seqs
        self.log.refresh()
        appended = self.log.append(lambda fold: record if rejection(fold, fold.end, record) is None else None)
        word = "retires nothing" if appended is None else "landed"
        self.walk.take(self, lambda label: label[-1] == word)
        return True

    def _rejection(self, seq):
        record = model.Record("RETIRE", self.number, term=self.state.term, seqs=(seq,))
        return model.rejection(self.walk.state.log.fold, record, frozenset())

    def _unpinning(self):
        self.walk.expected = lambda record: record.kind == "UNPIN"
        freed = Catalog(self.log).unpin(self.state.loaded, holder=f"writer {self.number}")
        word = "holds no pin" if freed is None else "landed"
        self.walk.take(self, lambda label: label[-1] == word)

    def _dead(self):
        with contextlib.suppress(FencedError):
            begin(self.log, self.incarnation, checkpoint_id="x", world_size=2)
            raise Strayed("a fenced incarnation began an attempt")


class Walk:
    """One random walk through the model, which the code must follow step by step.

    Args:
        seed: Of all that is drawn.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)  # noqa: S311  (a walk, not a secret)
        self.store = MemoryStore(clock=ManualClock())
        self.state = first_state(SETTING)
        self.walkers = [Walker(self, number) for number in range(SETTING.writers)]
        self.owners, self.late, self.seen = {}, [], []
        self.expected = lambda _: True
        self._busy = []

    def go(self, steps):
        """Walk, and compare after each step."""
        for _ in range(steps):
            self._anything()
            self.compare()

    def _anything(self):
        if self.late and self.rng.random() < 0.15:
            self._arrive(*self.late.pop(self.rng.randrange(len(self.late))))
            return
        started = [each for each in self.walkers if each.state != Writer()] or self.walkers[:1]
        can_begin = started[-1].state != Writer() and self.rng.random() < 0.15
        coming = self.walkers[len(started) : len(started) + 1] if can_begin else []
        free = [each for each in coming or started if each not in self._busy]
        if free:
            walker = self.rng.choice(free)
            self._busy.append(walker)
            before, self.expected = self.expected, lambda record: record.kind == "CLAIM"
            walker.act()
            self.expected = before
            self._busy.remove(walker)

    def decide(self, walker, slot, act):
        """Decide what becomes of a send to the next free slot, in both worlds."""
        assert slot == self.state.log.end
        expected = self.expected
        is_refused = self.rng.random() < 0.1
        word = "is refused" if is_refused else "sends"
        self.take(walker, lambda label: label[1] == word and expected(label[2]))
        if is_refused:
            raise AccessDeniedError("The store refuses.")
        record = self.state.writers[walker.number].sent.record
        if record.kind in ("CLAIM", "COMMIT", "RETIRE") and len(self._busy) < 2 and self.rng.random() < 0.4:
            for _ in range(self.rng.choice([1, 2, 3])):
                self._anything()
        self.expected = expected
        fate = self.rng.choice(["lands", "lands", "lands", "late", "reply lost", "twice"])
        if fate == "late" and slot == self.state.log.end:
            self.late.append((slot, record, act))
            walker.silent = True
            raise OutcomeUnknownError("Nobody answers.")
        self._store_takes(slot, record)
        answer = act()
        if fate == "twice":
            self.late.append((slot, record, act))
        if fate == "reply lost":
            raise OutcomeUnknownError("The reply was lost.")
        return answer

    def _arrive(self, slot, record, act):
        self._store_takes(slot, record)
        with contextlib.suppress(AlreadyExistsError):
            act()

    def _store_takes(self, slot, record):
        """Let the model's store take the request, if the slot is free still."""
        if slot == self.state.log.end:
            self.take(None, lambda label: label == ("store takes", slot, record))

    def take(self, walker, fits):
        """Let the model take the one step that fits; it breaks nothing."""
        who = ("store takes",) if walker is None else (f"writer {walker.number}",)
        steps = [step for step in successors(self.state, SETTING) if step.label[:1] == who and fits(step.label)]
        if not steps:
            raise Strayed(who, self.seen[-12:], [step.label for step in successors(self.state, SETTING)])
        if steps[0].broken is not None:
            raise Strayed(steps[0])
        self.seen.append(steps[0].label)
        self.state = steps[0].state

    def compare(self):
        """See that a reader finds the model's log, and the model's orphans."""
        log = RunLog.open(self.store, clock=ManualClock())
        fold = self.state.log.fold
        found = told(log.fold, lambda stem: self.owners[str(stem)])
        assert found == without_steps(fold), self.seen[-12:]
        kinds = [(entry.record.KIND, getattr(entry.record, "parent", None)) for entry in log.records()]
        assert kinds == [(record.kind, record.parent) for record in self.state.log.records]
        newest = log.fold.newest
        assert (newest.seq if newest else None) == (fold.newest.seq if fold.newest else None)
        committed = {each.attempt for each in fold.kept} | {attempt for _, attempt in fold.retired}
        uncommitted = {attempt for attempt, _ in self.state.objects} - committed
        states = {
            model.Attempt(each.stem.term, each.stem.attempt, self.owners[str(each.stem)]): each.state
            for each in Catalog(log).in_progress()
        }
        assert states == {
            attempt: "dead" if fold.is_orphan(attempt, frozenset()) else "in progress" for attempt in uncommitted
        }
