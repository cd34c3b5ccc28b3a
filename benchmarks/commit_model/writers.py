"""What a start of a training job does: claim, select, pin, save, retire; and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.commit_model.records import Attempt, Kept, Record, rejection
from benchmarks.commit_model.state import (
    PIECES,
    Setting,
    State,
    Step,
    Writer,
    chosen,
    objects_of,
    outcomes,
    sendings,
    spend,
    with_writer,
)

Moves = Callable[[State, int, Setting], Iterator[Step]]


def writer_steps(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Yield what writer `i` may do next."""
    writer = state.writers[i]
    if writer.at == "dead" or (i and writer == state.writers[i - 1] == Writer()):
        return  # writers are alike: they start in order
    if writer.sent is None:
        yield from _WHEN[writer.at](state, i, setting)
        return
    for how, then, sent in outcomes(state, writer.sent, setting):
        label = (f"writer {i}", sent.record.kind, how)
        if how == "again":
            yield Step(label, with_writer(then, i, writer._replace(sent=sent)))
        else:
            answered = with_writer(then, i, writer._replace(sent=None))
            yield from _answered(answered, i, setting, record=sent.record, how=how, label=label)


def _answered(
    state: State, i: int, setting: Setting, *, record: Record, how: str, label: tuple[object, ...]
) -> Iterator[Step]:
    """Go on with the outcome of an append. OTHER: decide again from the start."""
    writer = state.writers[i]
    if how == "other" and "no re-validation" in setting.wrong:
        yield from _send(state, i, setting, record)
    elif how == "other" and record.kind == "RETIRE":
        yield from _retire_again(state, i, setting, record)
    elif how == "other":
        yield from _WHEN[writer.at](state, i, setting)
    elif how == "landed":
        yield _landed(state, i, setting, record=record, label=label)
    elif record.kind == "COMMIT":
        yield _not_known_to_stand(state, i, setting, how=how, label=label)
    else:  # it raises; who calls may try again, and decides anew
        back = {"pinning": "selecting", "going back": "selecting", "unpinning": "idle", "retiring": "idle"}
        yield Step(label, with_writer(state, i, writer._replace(at=back.get(writer.at, writer.at))))


def _send(state: State, i: int, setting: Setting, record: Record, **changes: Any) -> Iterator[Step]:
    for then, sent in sendings(state, record, setting):
        label = (f"writer {i}", "sends" if sent.in_doubt else "is refused", record)
        yield Step(label, with_writer(then, i, state.writers[i]._replace(sent=sent, **changes)))


def _landed(state: State, i: int, setting: Setting, *, record: Record, label: tuple[object, ...]) -> Step:
    writer = state.writers[i]
    match record.kind:
        case "CLAIM":
            at = "idle" if _loads_first(setting) or writer.term else "selecting"
            writer, broken = writer._replace(at=at, term=record.term, number=0), None
        case "COMMIT":
            return _done(state, i, attempt=record.attempt, label=label)
        case "PIN":
            writer, broken = writer._replace(at="loading", pinned=True), None
        case "SET_ASIDE":
            writer, broken = writer._replace(at="selecting"), None
        case _:  # UNPIN, RETIRE
            writer, broken = writer._replace(at="idle"), None
    return Step(label, with_writer(state, i, writer), broken)


# ---------------------------------------------------------------- claim


def _claim(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Begin the reign, unless it has begun: of a claim whose outcome was unknown, the log tells."""
    fold, writer = state.log.fold, state.writers[i]
    if _loads_first(setting) and writer.at == "new":
        yield from _select(state, i, setting)
        return
    own = dict(fold.reigns).get(i)
    if own is not None and "a claim per writer object" not in setting.wrong:
        if own == fold.term:
            at = "idle" if _loads_first(setting) else "selecting"
            yield Step((f"writer {i}", "reigns"), with_writer(state, i, writer._replace(at=at, term=own)))
        else:
            yield _fenced(state, i, None)
        return
    yield from _send(state, i, setting, Record("CLAIM", i, term=fold.term + 1))


def _loads_first(setting: Setting) -> bool:
    """Say whether a process selects before it claims: DCP's door, or a wrong one."""
    return setting.door == "load first" or "claims last" in setting.wrong


# ---------------------------------------------------------------- resume


def _select(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Choose what to go on from, at the claim-first door below the claim, and pin it before it is read."""
    fold, writer = state.log.fold, state.writers[i]
    newest = chosen(state.log)
    if newest is None:
        at = "claiming" if _loads_first(setting) else "idle"
        yield Step((f"writer {i}", "starts fresh"), with_writer(state, i, writer._replace(at=at)))
        return
    for target in fold.selectable if setting.loads_any else [newest]:
        if not _loads_first(setting):
            pin = Record("PIN", i, seqs=(target.seq,), word=f"writer {i}")
            yield from _send(state, i, setting, pin, at="pinning", loaded=target.seq)
        else:
            yield Step((f"writer {i}", "selects", target.seq), _loaded(state, i, target, at="claiming"))
    if state.budget.rollbacks and not _loads_first(setting):
        for target in fold.selectable[:-1]:
            above = tuple(each.seq for each in fold.selectable if each.seq > target.seq)
            aside = Record("SET_ASIDE", i, seqs=above, word="abandoned")
            yield from _send(spend(state, "rollbacks"), i, setting, aside, at="going back")


def _load(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Read what is pinned. A pin that stands validly keeps every object of it (I14)."""
    writer = state.writers[i]
    target = state.log.fold.at(writer.loaded if writer.loaded is not None else -1)
    if target is not None and all(each in state.objects for each in objects_of(target.attempt, setting.wrong)):
        yield Step((f"writer {i}", "has loaded", target.seq), _loaded(state, i, target, at="idle"))
    else:
        selects = with_writer(state, i, writer._replace(at="selecting", pinned=False))
        yield Step((f"writer {i}", "misses what it pinned"), selects, f"I14: the pinned {writer.loaded} is not there")


def _loaded(state: State, i: int, target: Kept, *, at: str) -> State:
    return with_writer(state, i, state.writers[i]._replace(at=at, loaded=target.seq, step=target.step))


# ---------------------------------------------------------------- save


def _save(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Begin an attempt, or end one whose outcome is unknown, or retire what is old."""
    fold, writer = state.log.fold, state.writers[i]
    if "a claim per writer object" in setting.wrong and writer.number and writer.number < setting.saves:
        yield from _send(state, i, setting, Record("CLAIM", i, term=fold.term + 1))
    if setting.again and writer.unknown is not None:
        yield from _decide(with_writer(state, i, writer._replace(attempt=writer.unknown)), i, setting)
    if fold.term > writer.term and "no fence" not in setting.wrong:  # it learns before it uploads
        yield _fenced(state, i, None)
        return
    yield from _retire(state, i, setting)
    if writer.number >= setting.saves:
        return
    committed = fold.tip[1] if fold.tip is not None and fold.term == writer.term else 0
    attempt = Attempt(writer.term, max(writer.number, committed) + 1, i)
    begun = with_writer(state, i, writer._replace(number=attempt.number))
    if state.budget.torn:
        torn = spend(begun, "torn")
        half = torn._replace(objects=torn.objects | {(attempt, PIECES[0])})
        yield Step((f"writer {i}", "uploads a half of", attempt), half)
    if state.log.end < setting.slots:
        whole = frozenset(objects_of(attempt, setting.wrong))
        broken = f"I6: {attempt} is written twice" if (attempt, 0) in state.objects else None
        for step in _commit(begun._replace(objects=state.objects | whole), i, setting, attempt):
            yield step._replace(broken=broken)


def _decide(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Decide, from the fold below the slot, what becomes of the attempt under way."""
    fold, writer = state.log.fold, state.writers[i]
    attempt = writer.attempt
    assert attempt is not None  # noqa: S101  (set when it began)
    seq = None if "bytes remade" in setting.wrong else fold.committed_at(attempt)
    if seq is not None and fold.at(seq):
        yield _done(state, i, attempt=attempt, label=(f"writer {i}", "finds committed", attempt))
    elif seq is not None:
        over = writer._replace(at="idle", attempt=None, unknown=None)
        yield Step((f"writer {i}", "is told that it was retired", attempt), with_writer(state, i, over))
    elif fold.term > attempt.term and "no fence" not in setting.wrong:
        yield _fenced(state, i, attempt)
    elif fold.tip is not None and attempt.number <= fold.tip[1] and "no superseding" not in setting.wrong:
        over = writer._replace(at="idle", attempt=None, unknown=None)
        told = (f"writer {i}", "is told superseded", attempt)
        yield Step(told, with_writer(state, i, over), _reported_failed(state, attempt))
    else:
        yield from _commit(state, i, setting, attempt)


def _commit(state: State, i: int, setting: Setting, attempt: Attempt) -> Iterator[Step]:
    """Verify by listing that everything is there, and send the record."""
    fold, writer = state.log.fold, state.writers[i]
    if not all(each in state.objects for each in objects_of(attempt, setting.wrong)):
        over = writer._replace(at="idle", attempt=None)
        yield Step((f"writer {i}", "misses objects of", attempt), with_writer(state, i, over))
        return
    parent = writer.loaded if fold.tip is None or fold.term != attempt.term else fold.tip[0]
    record = Record("COMMIT", i, attempt.term, attempt.number, parent=parent, step=writer.step + 1)
    yield from _send(state, i, setting, record, at="committing", attempt=attempt)


def _done(state: State, i: int, *, attempt: Attempt, label: tuple[object, ...]) -> Step:
    """Tell that it is committed; let go of what was loaded."""
    writer = state.writers[i]
    stands = any(
        record is not None
        and record.kind == "COMMIT"
        and record.attempt == attempt
        and seq not in state.log.fold.ignored
        for seq, record in enumerate(state.log.records)
    )
    unknown = None if writer.unknown == attempt else writer.unknown
    at = "unpinning" if writer.pinned else "idle"
    over = writer._replace(at=at, attempt=None, unknown=unknown, step=writer.step + 1)
    return Step(
        label, with_writer(state, i, over), None if stands else f"I5: {attempt} was reported done and is not in the log"
    )


def _not_known_to_stand(state: State, i: int, setting: Setting, *, how: str, label: tuple[object, ...]) -> Step:
    """Tell that it failed, or that nothing is known; of an attempt that was unknown before, a refusal tells nothing."""
    writer = state.writers[i]
    attempt = writer.attempt
    assert attempt is not None  # noqa: S101  (a commit was sent)
    over = writer._replace(at="idle", attempt=None)
    was_unknown = writer.unknown == attempt and "refusal believed" not in setting.wrong
    if how == "unknown" or was_unknown:
        then = with_writer(state, i, over._replace(unknown=attempt))
        if "clean-up on time-out" in setting.wrong:
            then = then._replace(objects=then.objects - {(attempt, piece) for piece in PIECES})
        return Step((*label, "told unknown"), then)
    return Step((*label, "reported failed"), with_writer(state, i, over), _reported_failed(state, attempt))


def _reported_failed(state: State, attempt: Attempt) -> str | None:
    """Return what is wrong with telling that `attempt` failed: it stands, or a request that is under way may land."""
    if any(each.attempt == attempt for each in state.log.fold.kept):
        return f"I5: {attempt} is reported failed and is committed"
    for slot, record in state.net:
        lands = slot == state.log.end and rejection(state.log.fold, record, state.log.wrong) is None
        if record.kind == "COMMIT" and record.attempt == attempt and lands:
            return f"I5: {attempt} is reported failed and may still land"
    return None


def _fenced(state: State, i: int, attempt: Attempt | None) -> Step:
    """Stop for good."""
    broken = f"I15: incarnation {i} is fenced by itself" if state.log.fold.claimant == i else None
    if broken is None and attempt is not None:
        broken = _reported_failed(state, attempt)
    return Step((f"writer {i}", "is fenced"), with_writer(state, i, Writer(at="dead")), broken)


# ---------------------------------------------------------------- what follows a commit


def _unpin(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """Let go of what was loaded; with no room left for a record the pin stays."""
    writer = state.writers[i]
    freed = writer._replace(at="idle", pinned=False)
    target = state.log.fold.at(writer.loaded if writer.loaded is not None else -1)
    if target is None or f"writer {i}" not in target.pins:
        yield Step((f"writer {i}", "holds no pin"), with_writer(state, i, freed))
        return
    unpin = Record("UNPIN", i, seqs=(target.seq,), word=f"writer {i}")
    if state.log.end < setting.slots:
        yield from _send(with_writer(state, i, freed), i, setting, unpin, at="unpinning")
    else:
        yield Step((f"writer {i}", "keeps its pin"), with_writer(state, i, freed))


def _retire(state: State, i: int, setting: Setting) -> Iterator[Step]:
    """A trainer retires by its own policy; its record carries its term and is fenced like a commit."""
    if not state.budget.trainer_retires:
        return
    for kept in state.log.fold.kept:
        record = Record("RETIRE", i, term=state.writers[i].term, seqs=(kept.seq,))
        if rejection(state.log.fold, record, setting.wrong) is None:
            yield from _send(spend(state, "trainer_retires"), i, setting, record, at="retiring")


def _retire_again(state: State, i: int, setting: Setting, record: Record) -> Iterator[Step]:
    """Somebody else stands in the slot: is it valid in the next one?"""
    if rejection(state.log.fold, record, setting.wrong) is None:
        yield from _send(state, i, setting, record)
    else:
        yield Step((f"writer {i}", "retires nothing"), with_writer(state, i, state.writers[i]._replace(at="idle")))


_WHEN: dict[str, Moves] = {
    "new": _claim,
    "claiming": _claim,
    "selecting": _select,
    "pinning": _select,
    "going back": _select,
    "loading": _load,
    "idle": _save,
    "committing": _decide,
    "unpinning": _unpin,
}
