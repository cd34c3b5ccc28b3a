"""The bounded model is no fairy tale: what it says of a log, the code says; where it goes, the code goes."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest
from model_walks import Strayed, Walk, random_record, real_record, told, without_steps
from test_fold import folded

from benchmarks.commit_model.records import Log
from ckptstore.protocol import commit
from ckptstore.protocol.fold import Fold

SEEDS = 20


def walked(seeds):
    """Walk, and return how often each outcome was seen."""
    seen = Counter()
    for seed in seeds:
        walk = Walk(seed)
        walk.go(25)
        seen.update(str(label[-1]) if isinstance(label[-1], str) else str(label[1]) for label in walk.seen)
    return seen


@pytest.mark.parametrize("tenth", range(10))
def test_any_sequence_of_records_has_the_same_fold_in_the_model_and_in_the_code(tenth):
    """I3, I14: valid or passed over, kept, selectable, pinned, retired."""
    seen = Counter()
    for seed in range(tenth * SEEDS, (tenth + 1) * SEEDS):
        rng = random.Random(seed)  # noqa: S311  (a sequence, not a secret)
        log, fold = Log(frozenset()), folded()
        for _ in range(40):
            record = random_record(rng, log.fold)
            log, fold = log.append(record), folded(real_record(record), fold=fold)
            assert told(fold, lambda stem: int(stem.nonce, 16)) == without_steps(log.fold), log.records
            seen[record.kind, log.last_is_valid] += 1
    kinds = {kind for kind, _ in seen}
    assert len(kinds) == 9
    assert min(seen[kind, valid] for kind in kinds for valid in (True, False)) > 0


@pytest.mark.parametrize("tenth", range(10))
def test_the_code_follows_the_model_through_lost_late_refused_and_interleaved_requests(tenth):
    """I5, I15, I16: who is told what, who is fenced, what stands in the log, what is an orphan."""
    seen = walked(range(tenth * SEEDS, (tenth + 1) * SEEDS))
    assert seen["landed"] > 100
    assert min(seen[word] for word in ("is fenced", "told unknown", "reported failed", "has loaded")) > 0


def test_code_that_believes_a_refusal_after_an_unknown_outcome_strays_from_the_model(monkeypatch):
    """I5: the walks would see it."""
    monkeypatch.setattr(commit, "_in_doubt", lambda *_: contextlib.nullcontext())
    with pytest.raises((Strayed, AssertionError)):
        walked(range(10 * SEEDS))


def test_a_fold_that_forgets_superseding_strays_from_the_model(monkeypatch):
    """I7: the same."""
    monkeypatch.setattr(Fold, "supersedes", lambda *_: False)
    with pytest.raises((Strayed, AssertionError)):
        walked(range(10 * SEEDS))
