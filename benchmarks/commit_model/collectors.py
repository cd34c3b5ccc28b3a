"""What a collection does: plan, show the plan, and apply it when it is quoted; RETIRE first, then delete one by one."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.commit_model.records import Attempt, Record, rejection
from benchmarks.commit_model.state import (
    SHARED,
    Collector,
    Object,
    Plan,
    Setting,
    State,
    Step,
    named,
    objects_of,
    outcomes,
    sendings,
    spend,
    with_collector,
)

AUTHOR = 100


def plan_of(state: State, retire: tuple[int, ...], setting: Setting) -> Plan:
    """Return the plan of a collection by a policy that retires `retire`, from the log and a listing.

    What is retired already, or cannot be retired now, is not in it.
    """
    fold, wrong = state.log.fold, setting.wrong
    record = Record("RETIRE", AUTHOR, seqs=retire)
    retire = retire if rejection(fold, record, wrong) is None else ()
    going = {each.attempt for each in fold.kept if each.seq in retire}
    gone = {attempt for _, attempt in fold.retired} | going
    live = {each.attempt for each in fold.kept} - going
    keys = named(state.log) if "hash-named" in wrong else set()

    def is_garbage(key: Object) -> bool:
        attempt: Attempt = key[0]
        if attempt == SHARED:
            return key not in keys
        return attempt in gone or (attempt not in live and fold.is_orphan(attempt, wrong))

    seqs = (*(seq for seq, _ in fold.retired), *retire)
    return Plan(retire, tuple(sorted(key for key in state.objects if is_garbage(key))), tuple(sorted(seqs)))


def collector_steps(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Yield what collector `i` may do next."""
    collector, who = state.collectors[i], f"collector {i}"
    if collector.sent is not None:
        for how, then, sent in outcomes(state, collector.sent, setting):
            if how == "again":
                yield Step((who, sent.record.kind, how), with_collector(then, i, collector._replace(sent=sent)))
            else:
                answered = with_collector(then, i, collector._replace(sent=None))
                yield from _answered(answered, i, setting, record=sent.record, how=how)
    elif collector.at == "idle":
        yield from _shown(state, i, setting)
    elif collector.at == "shown":
        yield from _apply(state, i, setting)
    else:
        yield from _delete(state, i, setting)


def _shown(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Read the log, list the data, and show a plan. One policy for each checkpoint that may be retired, and none."""
    policies = {()} | {plan_of(state, (each.seq,), setting).retire for each in state.log.fold.kept}
    for policy in sorted(policies):
        plan = plan_of(state, policy, setting)
        if plan.retire or plan.delete or plan.gone:
            yield Step((f"collector {i}", "shows", plan), with_collector(state, i, Collector("shown", plan)))


def _apply(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Plan again; apply the plan that was quoted, or refuse (I17)."""
    who, shown = f"collector {i}", state.collectors[i].plan
    assert shown is not None  # noqa: S101  (it was shown)
    plan = plan_of(state, shown.retire, setting)
    broken = None
    if plan != shown:
        if "plan not quoted" not in setting.wrong:
            yield Step((who, "refuses another plan"), with_collector(state, i, Collector()))
            return
        broken = f"I17: {shown} was shown and {plan} is applied"
    collector = Collector("deleting", plan, plan.delete)
    if plan.retire and "RETIRE after deletion" not in setting.wrong:
        for step in _send(state, i, setting, Record("RETIRE", AUTHOR + i, seqs=plan.retire), collector):
            yield step._replace(broken=broken)
    else:
        yield Step((who, "applies"), with_collector(state, i, collector), broken)


def _send(state: State, i: int, setting: Setting, record: Record, collector: Collector) -> Iterator[Step]:
    for then, sent in sendings(state, record, setting):
        label = (f"collector {i}", "sends" if sent.in_doubt else "is refused", record)
        yield Step(label, with_collector(then, i, collector._replace(sent=sent)))


def _answered(state: State, i: int, setting: Setting, *, record: Record, how: str) -> Iterator[Step]:
    label, collector = (f"collector {i}", record.kind, how), state.collectors[i]
    if how == "other" and "no re-validation" in setting.wrong:
        yield from _send(state, i, setting, record, collector)
    elif how == "other" and record.kind == "RETIRE":
        yield from _retire_again(state, i, setting)
    elif how == "other":
        yield from _delete(state, i, setting)
    elif how == "landed" and record.kind == "RETIRE":
        yield Step(label, state)
    else:  # done, or it raises: the next collection goes on
        done = with_collector(state, i, Collector())
        if how == "landed" and "log records deleted" in setting.wrong:
            done = done._replace(log=done.log.without(record.seqs[0]), net=frozenset())
        yield Step(label, done)


def _retire_again(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Retire what was shown, if it may be retired still; what another collection has retired is retired (I17)."""
    collector, fold = state.collectors[i], state.log.fold
    plan = collector.plan
    assert plan is not None  # noqa: S101  (it is applied)
    left = tuple(seq for seq in plan.retire if seq not in dict(fold.retired))
    record = Record("RETIRE", AUTHOR + i, seqs=left)
    if not left:
        yield Step((f"collector {i}", "finds it retired"), state)
    elif rejection(fold, record, setting.wrong) is None:
        yield from _send(state, i, setting, record, collector)
    else:
        yield Step((f"collector {i}", "refuses", plan), with_collector(state, i, Collector()))


def _delete(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Delete the next object; at the end say COLLECTED of that of which a fresh listing shows nothing."""
    collector, who, fold = state.collectors[i], f"collector {i}", state.log.fold
    plan = collector.plan
    assert plan is not None  # noqa: S101  (it is applied)
    if collector.left:
        key, *left = collector.left
        failed = with_collector(state, i, collector._replace(left=tuple(left)))
        if state.budget.failed_deletes and key in state.objects:
            yield Step((who, "cannot delete", key), spend(failed, "failed_deletes"))
        then = failed._replace(objects=failed.objects - {key}, deleted=failed.deleted | {key})
        broken = f"I8: {key} is deleted, which a kept commit names" if key in named(state.log) else None
        yield Step((who, "deletes", key), then, broken)
        if "COLLECTED early" not in setting.wrong:
            return
    retire = Record("RETIRE", AUTHOR + i, seqs=plan.retire)
    if "RETIRE after deletion" in setting.wrong and rejection(fold, retire, setting.wrong) is None:
        yield from _send(state, i, setting, retire, collector)
        return
    there = {key[0] for key in state.objects} if not {"COLLECTED unseen", "COLLECTED early"} & setting.wrong else set()
    gone = tuple(seq for seq, attempt in fold.retired if seq in plan.gone and attempt not in there)
    if gone:
        yield from _send(state, i, setting, Record("COLLECTED", AUTHOR + i, seqs=gone), collector)
        if state.log.end >= setting.slots:  # no room in the model
            yield Step((who, "ends"), with_collector(state, i, Collector()))
    else:
        yield Step((who, "ends"), with_collector(state, i, Collector()))


def left_behind(state: State, collected: Record, setting: Setting) -> str | None:
    """Return what is wrong with `collected`: bytes are left that did not come back since."""
    retired = dict(state.log.fold.retired)
    keys = {key for seq in collected.seqs if seq in retired for key in objects_of(retired[seq], setting.wrong)}
    if "hash-named" in setting.wrong:
        keys = {key for key in keys if key[0] != SHARED}
    left = keys & state.objects - state.returned
    return f"COLLECTED: {sorted(left)} are there still" if left else None
