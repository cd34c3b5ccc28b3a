"""The invariants of PROTOCOL.md, asked of every state that can be reached.

I9 is reserved, and I13 is about flipped bits, which the model does not have: neither is here. I1 and I2 are what a
conditional create is, so here they are asked of what deletes. I16 has no check of its own that could fail alone: each
request may come late, twice or never in every state, and all other invariants are asked there; what it adds is that no
attempt is committed twice. I5, I6, I8, I12, I14, I15 and I17 are asked, too, of the steps that could break them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from benchmarks.commit_model.records import MIN_KEEP, Fold, Log, Record, folded, rejection
from benchmarks.commit_model.state import Setting, State, chosen, named, objects_of

CHECKED = ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I10", "I11", "I12", "I14", "I15", "I16", "I17", "COLLECTED")
NOT_MODELLED = {"I9": "reserved for borrowing", "I13": "the model has no bits that could flip"}
FOLD_EVERY = 3
"""Every so many slots the model's log holds a hash of the fold below, so that small logs have snapshots, too."""

FINE = "fine"


def violation(state: State, setting: Setting) -> str | None:
    """Return the first invariant that `state` breaks, or None."""
    lost = named(state.log) - state.objects
    if lost:
        return f"I4: kept commits name {sorted(lost)}, which are not there"
    for slot, record in state.net:
        if record.kind == "COMMIT" and slot == state.log.end:
            lacks = [each for each in objects_of(record.attempt, setting.wrong) if each not in state.objects]
            if lacks and rejection(state.log.fold, record, setting.wrong) is None:
                return f"I7: a COMMIT that can still land lacks {lacks}"
    log = state.log
    if log.verdict is None:
        log.verdict = next(_of_log(log, setting), FINE)
    return None if log.verdict == FINE else log.verdict


def subjects(state: State) -> Iterator[str]:
    """Yield the invariants that have something to be broken in `state`; in all others they hold for want of it."""
    log = state.log
    if log.subjects is None:
        log.subjects = _subjects_of(log)
    yield from log.subjects
    if state.objects:
        yield "I6"
    if any(record.kind == "COMMIT" and slot == log.end for slot, record in state.net):
        yield "I7"
    if state.net:
        yield "I16"
    if any(writer.at == "committing" for writer in state.writers):
        yield "I5"
    if any(collector.at == "shown" for collector in state.collectors):
        yield "I17"
    if any(collector.left for collector in state.collectors):
        yield "I8"
    if any(record.kind == "COLLECTED" for _, record in state.net):
        yield "COLLECTED"
    if state.reader.read is not None:
        yield "I12"


def _subjects_of(log: Log) -> tuple[str, ...]:
    kinds = Counter(record.kind for _, record in _valid(log))
    holds = {
        "I1": log.end > 0,
        "I2": log.end > 0,
        "I3": kinds["CLAIM"] > 1,
        "I4": bool(log.fold.kept),
        "I10": log.end > 0,
        "I11": kinds["COMMIT"] > 0,
        "I14": kinds["RETIRE"] > 0,
        "I15": kinds["CLAIM"] > 1 and kinds["COMMIT"] > 0,
    }
    return tuple(name for name, is_there in holds.items() if is_there)


def _of_log(log: Log, setting: Setting) -> Iterator[str]:
    """Yield what is wrong with a log; that below its last record was asked when that was the last."""
    if None in log.records:
        yield f"I1: a slot disappeared, so the log has a hole (I2): {log.records}"
        return
    if len(log.records) != log.end:
        yield f"I2: {log.end} slots are folded, {len(log.records)} stand there"
    yield from _of_answers(log, setting)
    if log.before is None or log.last is None or not log.last_is_valid:
        return
    below, record = log.before.fold, log.last
    match record.kind:
        case "CLAIM":
            if record.term <= max((term for _, term in below.reigns), default=0):
                yield f"I3: term {record.term} is claimed after a higher one"
        case "COMMIT":
            yield from _of_commit(log, record, setting)
        case "RETIRE":
            yield from _of_retire(below, log.fold, record)


def _valid(log: Log) -> list[tuple[int, Record]]:
    """Return the records that were not passed over, with their slots."""
    return [
        (seq, record) for seq, record in enumerate(log.records) if record is not None and seq not in log.fold.ignored
    ]


def _of_commit(log: Log, commit: Record, setting: Setting) -> Iterator[str]:
    assert log.before is not None  # noqa: S101  (it has a last record)
    before = _valid(log.before)
    claims = [(seq, record) for seq, record in before if record.kind == "CLAIM"]
    if not claims or commit.term != max(record.term for _, record in claims):
        yield f"I3: {commit.attempt} is committed after a claim of a higher term"
    committed = [record.attempt for _, record in before if record.kind == "COMMIT"]
    if commit.attempt in committed:
        yield f"I16: {commit.attempt} is committed twice"
    if any(other.term == commit.term and other.number > commit.number for other in committed):
        yield f"I7: {commit.attempt} is committed after a later attempt, when it is an orphan already"
    reign = next((seq for seq, record in claims if (record.author, record.term) == (commit.author, commit.term)), None)
    own = [seq for seq, record in before if record.kind == "COMMIT" and record.term == commit.term]
    if own and commit.parent != own[-1]:
        yield f"I15: {commit.attempt} goes on from {commit.parent}, its lineage ends in {own[-1]}"
    if not own and reign is not None and setting.door == "claim first" and not setting.loads_any:
        newest = {log.below(end).fold.newest for end in range(reign, log.end)}
        if commit.parent not in {None if each is None else each.seq for each in newest}:
            yield f"I15: {commit.attempt} goes on from {commit.parent}, never the newest since its claim: {newest}"


def _of_retire(below: Fold, above: Fold, retire: Record) -> Iterator[str]:
    """I14, and a trainer's RETIRE (I3)."""
    targets = set(retire.seqs)
    if retire.term and retire.term < below.term:
        yield f"I3: a trainer of term {retire.term} retires in term {below.term}"
    if any(each.pins for each in below.kept if each.seq in targets):
        yield f"I14: {retire.seqs} is retired, which is pinned"
    if below.newest is not None and below.newest.seq in targets:
        yield f"I14: {retire.seqs} is retired, the newest"
    verified = [each.seq for each in below.selectable if each.verified]
    if verified and verified[-1] in targets:
        yield f"I14: {retire.seqs} is retired, the newest verified"
    if len(above.selectable) < min(MIN_KEEP, len(below.selectable)):
        yield f"I14: of {len(below.selectable)} selectable checkpoints {len(above.selectable)} are left"


def _of_answers(log: Log, setting: Setting) -> Iterator[str]:
    """I10, I11: whatever the hints hold, a reader is given the newest selectable checkpoint."""
    commits = [(seq, record) for seq, record in _valid(log) if record.kind == "COMMIT"]
    kept = {each.seq for each in log.fold.kept if not each.aside}
    right = max((seq for seq, _ in commits if seq in kept), default=None)
    given = chosen(log)
    if (None if given is None else given.seq) != right:
        yield f"I11: a reader is given {given}, the newest selectable is {right}"
    for hint in (None, *range(log.end + 2)):
        for told in _snapshots_of(log):
            fold = read(log, hint, told, setting)
            if fold != log.fold:
                yield f"I10: with latest.json at {hint} and state/ of {sorted(told)} a reader folds {fold}"
                return


def _snapshots(log: Log) -> range:
    return range(FOLD_EVERY, log.end, FOLD_EVERY)


def _snapshots_of(log: Log) -> Iterator[dict[int, Fold]]:
    """Yield what may stand in `state/`: nothing, the fold of another slot, the right one, or one of another history."""
    yield {}
    for seq in _snapshots(log):
        right = log.below(seq).fold
        for fold in (log.below(seq - 1).fold, right, log.fold, right._replace(kept=()), right._replace(term=99)):
            yield {seq: fold}


def read(log: Log, hint: int | None, states: dict[int, Fold], setting: Setting) -> Fold:
    """Return the fold that a reader finds (section 8), where `latest.json` names `hint` and `state/` is `states`."""
    listed = log.end
    if hint is not None and "hints believed" in setting.wrong:
        listed = min(hint + 1, log.end)
    start = Fold()
    for seq in reversed(_snapshots(log.below(listed))):
        vouched = log.below(seq).fold  # its hash stands in the record of that slot
        if seq in states and (states[seq] == vouched or "states believed" in setting.wrong):
            start = states[seq]
            break
    fold = start
    for record in log.records[start.end : listed]:
        if record is not None:
            fold = folded(fold, record, log.wrong)
    return fold
