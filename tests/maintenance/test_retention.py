"""What a policy lets go of, whatever the log holds: never what somebody relies on (I14)."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore.errors import InvalidInputError
from ckptstore.format.codec import PartRef
from ckptstore.format.records import ABANDONED, QUARANTINED, Commit, Retire, ShardTotals
from ckptstore.maintenance.retention import Keep, retirable, unmatched
from ckptstore.protocol.fold import Committed, Fold, Pinned, rejection
from ckptstore.protocol.retirement import MIN_KEEP, refusals

NONCE = f"{7:032x}"
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


def checkpoint(seq, *, step=None, metrics=None, tags=(), at="2026-01-02T03:04:05.678Z", **more):
    prefix = f"c.t0001.a{seq:04d}.{NONCE}"
    part = PartRef(f"data/0/{prefix}/part-00000.json.gz", 1, "0" * 64, 1, (0, 0))
    commit = Commit(
        "c", step, 1, seq, None, prefix, 1, {}, {}, {}, dict(metrics or {}), tags, ShardTotals(1, 1), (part,), None, {}
    )
    return Committed(seq, "0" * 64, at, commit, **more)


def fold_of(*checkpoints):
    commits = {each.seq: each for each in checkpoints}
    return Fold("run", "0" * 64, "0" * 64, end=max(commits, default=0) + 1, commits=commits)


def left(fold, keep):
    gone = retirable(fold, keep)
    return [seq for seq in sorted(fold.commits) if seq not in gone]


def test_the_newest_are_those_of_the_highest_seq_whatever_their_step_name_or_time():
    fold = fold_of(
        *(checkpoint(seq, step=step, at=f"20{30 - seq}") for seq, step in enumerate((9, 10, 99, 100, 1000, 99), 1))
    )
    assert left(fold, Keep(last=2)) == [5, 6]


def test_one_that_is_asked_to_stay_alone_has_another_beside_it():
    fold = fold_of(*(checkpoint(seq) for seq in range(1, 5)))
    assert left(fold, Keep(last=1)) == [3, 4]
    assert left(fold_of(checkpoint(1)), Keep(last=1)) == [1]
    assert retirable(fold_of(), Keep(last=1)) == []


@pytest.mark.parametrize(("mode", "best"), [("min", [2, 3]), ("max", [1, 5])])
def test_the_best_are_those_of_a_finite_number_and_of_equal_ones_the_newest(mode, best):
    losses = (3.0, 1.0, 1.0, math.nan, 3.0, math.inf, -math.inf, 2.0)
    fold = fold_of(*(checkpoint(seq, metrics={"loss": loss}) for seq, loss in enumerate(losses, 1)), checkpoint(9))
    fold.commits[10] = checkpoint(10, metrics={"acc": -5.0})
    assert left(fold, Keep(best=("loss", mode, 2))) == [*best, 9, 10]
    assert left(fold, Keep(best=("loss", "min", 1))) == [3, 9, 10]


def test_every_so_many_steps_are_kept_the_first_one_too_and_large_ones():
    steps = (0, 5, 10, 15, None, 2**40, 2**40 + 1, 7, 8)
    fold = fold_of(*(checkpoint(seq, step=step) for seq, step in enumerate(steps, 1)))
    assert left(fold, Keep(every=10)) == [1, 3, 8, 9]
    assert left(fold, Keep(every=2**40)) == [1, 6, 8, 9]


def test_of_each_hour_or_day_that_has_one_the_newest_is_kept():
    moments = ("01T10:00", "01T10:59", "02T08:00", "02T09:10", "02T09:50", "05T00:00", "05T00:01")
    fold = fold_of(*(checkpoint(seq, at=f"2026-01-{moment}:00.000Z") for seq, moment in enumerate(moments, 1)))
    assert left(fold, Keep(hourly=3)) == [3, 5, 6, 7]
    assert left(fold, Keep(daily=2)) == [5, 6, 7]
    assert left(fold, Keep(daily=9)) == [2, 5, 6, 7]


def test_a_clock_that_goes_back_orders_nothing():
    moments = ("T12", "T11", "T12", "T11", "T10")
    fold = fold_of(*(checkpoint(seq, at=f"2026-01-01{moment}:00") for seq, moment in enumerate(moments, 1)))
    assert left(fold, Keep(hourly=2)) == [4, 5]
    assert left(fold, Keep(hourly=3)) == [3, 4, 5]


def test_what_has_a_tag_stays():
    fold = fold_of(*(checkpoint(seq, tags=tags) for seq, tags in enumerate((["a"], ["b", "c"], ["d"], [], []), 1)))
    assert left(fold, Keep(tags=("c", "a"))) == [1, 2, 4, 5]
    assert left(fold, Keep(tags="d")) == [3, 4, 5]


def test_a_policy_that_chooses_nothing_lets_go_of_nothing():
    fold = fold_of(*(checkpoint(seq, tags=["a"], step=seq, metrics={"loss": math.nan}) for seq in range(1, 6)))
    for keep in (Keep(tags="A"), Keep(best=("los", "min", 3)), Keep(best=("loss", "min", 3)), Keep(every=10)):
        assert retirable(fold, keep) == []
    assert left(fold, Keep(tags="A", every=2)) == [2, 4, 5]


def test_a_name_that_no_checkpoint_has_is_said_with_those_that_there_are():
    some = [checkpoint(seq, tags=[f"t{seq}"], metrics={"loss": seq, "acc": math.inf}) for seq in range(10)]
    assert unmatched(some, Keep(best=("loss", "min", 1), tags="t3", last=2)) == []
    assert unmatched(some, Keep(best=("acc", "min", 1), tags=("t3", "x"))) == [
        "No checkpoint has a finite metric 'acc'; there are the metrics 'acc', 'loss'.",
        "No checkpoint has the tag 'x'; there are the tags 't0', 't1', 't2', 't3', 't4', 't5', 't6', 't7', and 2 more.",
    ]
    assert unmatched([], Keep(tags="x")) == ["No checkpoint has the tag 'x'; there are no tags."]


@pytest.mark.parametrize(
    "parts",
    [
        {"tags": [f"t{number:05}" for number in range(3000)]},
        {"tags": ["\ud800"]},
        {"best": ("\ud800", "min", 1)},
        {"best": ("x" * 20_000, "min", 1)},
        {"hourly": 2**63},
        {"best": ("loss", "min", 10**400)},
    ],
    ids=["many", "no text", "no metric", "long", "large", "huge"],
)
def test_a_policy_that_cannot_be_recorded_is_refused_when_it_is_made(parts):
    with pytest.raises(InvalidInputError):
        Keep(**parts)


def test_what_is_set_aside_counts_for_no_rule_and_damaged_ones_are_evidence():
    good = [checkpoint(seq, metrics={"loss": seq}, step=10) for seq in (1, 3, 5, 7, 9)]
    aside = [
        checkpoint(seq, set_aside=reason, metrics={"loss": -seq}, step=10)
        for seq, reason in ((2, ABANDONED), (4, QUARANTINED), (8, ABANDONED))
    ]
    fold = fold_of(*good, *aside)
    assert left(fold, Keep(last=2)) == [4, 7, 8, 9]  # 8 may be wanted back: only one newer one stands for it
    assert left(fold, Keep(best=("loss", "min", 1))) == [1, 4, 7, 8, 9]
    assert left(fold, Keep(every=10)) == [1, 3, 4, 5, 7, 8, 9]


def test_after_a_roll_back_what_was_abandoned_goes_when_as_many_newer_ones_are_there_as_are_kept():
    before, aside = [checkpoint(seq) for seq in (1, 2, 3)], [checkpoint(seq, set_aside=ABANDONED) for seq in (4, 5)]
    newer = [checkpoint(seq) for seq in (7, 8, 9)]
    assert left(fold_of(*before, *aside), Keep(last=3)) == [1, 2, 3, 4, 5]
    assert left(fold_of(*before, *aside, *newer[:2]), Keep(last=3)) == [3, 4, 5, 7, 8]
    assert left(fold_of(*before, *aside, *newer), Keep(last=3)) == [7, 8, 9]
    assert left(fold_of(*aside), Keep(last=1)) == [4, 5]


def test_a_policy_reads_as_what_it_says():
    keep = Keep(last=3, best=("val_loss", "min", 2), every=1000, tags=("b", "a"))
    assert str(keep) == "keep last 3, best val_loss min 2, every 1000, tags a b"


rules = st.fixed_dictionaries(
    {},
    optional={
        "last": st.integers(1, 6),
        "best": st.tuples(st.sampled_from(["loss", "acc"]), st.sampled_from(["min", "max"]), st.integers(1, 4)),
        "every": st.integers(1, 5),
        "hourly": st.integers(1, 4),
        "daily": st.integers(1, 4),
        "tags": st.lists(st.sampled_from("ab"), min_size=1).map(tuple),
    },
).filter(bool)


@st.composite
def folds(draw):
    def one(seq):
        return checkpoint(
            seq,
            step=draw(st.none() | st.integers(0, 12)),
            metrics=draw(st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats(), max_size=2)),
            tags=tuple(draw(st.lists(st.sampled_from("abc"), max_size=2))),
            at=f"2026-01-0{draw(st.integers(1, 3))}T0{draw(st.integers(0, 2))}:00:00.000Z",
            set_aside=draw(st.sampled_from([None, None, None, ABANDONED, QUARANTINED])),
            pins=draw(st.sampled_from([(), (), (), (Pinned("eval", ""),)])),
            verified=draw(st.sampled_from([None, "exists", "full"])),
        )

    return fold_of(*(one(seq) for seq in range(1, draw(st.integers(0, 9)) + 1)))


def chooses(selectable, rule):
    """Say whether any rule of a policy chooses any checkpoint."""
    metric, every, tags = rule.get("best", [None])[0], rule.get("every"), {*rule.get("tags", ())}
    return any(
        {"last", "hourly", "daily"} & rule.keys()
        or math.isfinite(each.commit.metrics.get(metric, math.nan))
        or (every and each.commit.global_step is not None and each.commit.global_step % every == 0)
        or tags & {*each.commit.tags}
        for each in selectable
    )


@unhurried
@given(folds(), rules)
def test_what_a_policy_lets_go_of_may_be_retired_and_nothing_precious_is_in_it(fold, rule):
    gone = retirable(fold, Keep(**rule))
    assert gone == sorted(set(gone))
    selectable = [each.seq for each in fold.selectable]
    assert not {*gone} & {*selectable[-MIN_KEEP:]}
    assert fold.newest_verified is None or fold.newest_verified.seq not in gone
    assert not any(fold.commits[seq].pins or fold.commits[seq].set_aside == QUARANTINED for seq in gone)
    assert not gone or rejection(fold, fold.end, Retire(tuple(gone), "policy")) is None


def leaves_enough(fold, seqs):
    """I14, in other words than the log's."""
    kept, targets = {each.seq: each for each in fold.kept}, {*seqs}
    selectable = [seq for seq in sorted(kept) if kept[seq].set_aside is None]
    verified = [seq for seq in selectable if kept[seq].verified == "full"]
    return (
        targets <= kept.keys()
        and not any(kept[seq].pins for seq in targets)
        and targets.isdisjoint(selectable[-1:] + verified[-1:])
        and (targets.isdisjoint(selectable) or len({*selectable} - targets) >= 2)
    )


@unhurried
@given(folds(), st.lists(st.integers(0, 10), min_size=1, max_size=6))
def test_what_may_not_be_retired_is_named_with_a_reason_wherever_the_log_says_no(fold, seqs):  # I14
    refused = refusals(fold, seqs)
    named = [each.seq for each in refused]
    assert (not refused) == leaves_enough(fold, seqs)
    assert (not refused) == (rejection(fold, fold.end, Retire(tuple(seqs), "by name")) is None)
    assert {*named} <= {*seqs}
    left = [seq for seq in seqs if seq not in named]
    if any("would be left" in each.why for each in refused):
        assert refusals(fold, left) == []


@unhurried
@given(folds(), rules)
def test_rules_compose_as_a_union_and_what_is_let_go_of_stays_let_go_of(fold, rule):
    newest = {"last": 1}  # which always chooses something, and no more than always stays
    whole = {*retirable(fold, Keep(**newest | rule))}
    selectable = {each.seq for each in fold.selectable}
    parts = [{*retirable(fold, Keep(**newest | {name: value}))} for name, value in rule.items()]
    assert whole & selectable == set.intersection(*parts) & selectable
    assert retirable(fold, Keep(**rule)) == (sorted(whole) if chooses(fold.selectable, rule) else [])
    rest = fold_of(*(each for each in fold.kept if each.seq not in whole))
    assert retirable(rest, Keep(**rule)) == []


@unhurried
@given(folds(), rules, st.integers(0, 12), st.floats())
def test_a_commit_more_never_brings_back_what_was_let_go_of(fold, rule, step, loss):
    """So a plan that was shown still holds when the job commits in between (I17)."""
    more = fold_of(*fold.kept, checkpoint(fold.end, step=step, metrics={"loss": loss}, tags=("a",)))
    assert {*retirable(fold, Keep(**rule))} <= {*retirable(more, Keep(**rule))}
