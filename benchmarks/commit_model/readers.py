"""What a reader does, and what others do in one record: set aside, restore, verify."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.commit_model.records import Record
from benchmarks.commit_model.state import (
    Reader,
    Setting,
    State,
    Step,
    chosen,
    objects_of,
    outcomes,
    sendings,
    spend,
)

READER, OPERATOR = 200, 300
HOLDER = "reader"


def reader_steps(state: State, setting: Setting) -> Iterator[Step]:
    """Yield what the reader may do next."""
    reader = state.reader
    if not setting.reader or reader.at == "done":
        return
    if reader.sent is not None:
        for how, then, sent in outcomes(state, reader.sent, setting):
            yield from _answered(then, setting, how=how, reader=reader._replace(sent=sent))
    elif reader.at == "idle":
        yield from _select(state, setting)
    elif reader.at == "reading":
        yield from _read(state, setting)
    else:
        unpin = Record("UNPIN", READER, seqs=(reader.seq or 0,), word=HOLDER)
        for then, sent in sendings(state, unpin, setting):
            yield Step(("reader", "sends UNPIN"), then._replace(reader=reader._replace(sent=sent)))


def _answered(state: State, setting: Setting, *, how: str, reader: Reader) -> Iterator[Step]:
    sent = reader.sent
    assert sent is not None  # noqa: S101  (it was answered)
    label, freed = ("reader", sent.record.kind, how), reader._replace(sent=None)
    if how == "again":
        yield Step(label, state._replace(reader=reader))
    elif how == "landed" and sent.record.kind == "PIN":
        yield Step(label, state._replace(reader=freed._replace(at="reading", pinned=True)))
    elif how == "other" and sent.record.kind == "PIN":
        if "no re-validation" in setting.wrong:
            for then, new in sendings(state, sent.record, setting):
                yield Step(("reader", "sends PIN again"), then._replace(reader=freed._replace(sent=new)))
        else:
            yield from _select(state._replace(reader=Reader(tries=reader.tries)), setting)
    elif how == "landed":
        yield Step(label, state._replace(reader=Reader(at="done")))
    elif sent.record.kind == "PIN":
        yield Step(label, state._replace(reader=Reader(tries=reader.tries)))
    else:
        yield Step(label, state._replace(reader=freed))


def _select(state: State, setting: Setting) -> Iterator[Step]:
    newest = chosen(state.log)
    if newest is None:
        return
    if setting.reader == "pinned":
        pin = Record("PIN", READER, seqs=(newest.seq,), word=HOLDER)
        for then, sent in sendings(state, pin, setting):
            pinning = Reader("pinning", newest.seq, tries=state.reader.tries, sent=sent)
            yield Step(("reader", "sends PIN", newest.seq), then._replace(reader=pinning))
    else:
        selected = Reader("reading", newest.seq, tries=state.reader.tries)
        yield Step(("reader", "selects", newest.seq), state._replace(reader=selected))


def _read(state: State, setting: Setting) -> Iterator[Step]:
    """Let the next rank read its object; where it is missing, all ranks select anew, together."""
    reader = state.reader
    key = _key(state, reader, setting)
    if key in state.objects and reader.read is None:
        yield Step(("reader", "rank 0 reads", reader.seq), state._replace(reader=reader._replace(read=reader.seq)))
    elif key in state.objects:
        mixed = f"I12: the ranks have {reader.read} and {reader.seq}" if reader.read != reader.seq else None
        at = "unpinning" if reader.pinned else "done"
        over = Reader(at, reader.seq if reader.pinned else None, pinned=reader.pinned)
        yield Step(("reader", "rank 1 reads", reader.seq), state._replace(reader=over), mixed)
    elif reader.pinned:
        yield Step(("reader", "misses", key), state, f"I14: the pinned {reader.seq} is not there")
    elif reader.tries:
        newest = chosen(state.log)
        if "ranks fall back alone" in setting.wrong and newest is not None and newest.seq != reader.seq:
            alone = reader._replace(seq=newest.seq, tries=0)
            yield Step(("reader", "this rank alone takes", newest.seq), state._replace(reader=alone))
        else:
            yield from _select(state._replace(reader=Reader(tries=reader.tries - 1)), setting)
    else:
        yield Step(("reader", "raises"), state._replace(reader=Reader(at="done")))


def _key(state: State, reader: Reader, setting: Setting) -> object:
    """Return what the next rank reads: of the commit that was selected, retired since or not."""
    record = state.log.records[reader.seq or 0]
    if record is None:
        return None
    return objects_of(record.attempt, setting.wrong)[0 if reader.read is None else 1]


def other_steps(state: State, setting: Setting) -> Iterator[Step]:
    """Yield what people and tools may append, and data that arrive again after they were deleted."""
    fold, left, free = state.log.fold, state.budget, state.log.end < setting.slots
    records = [
        *(("quarantines", "SET_ASIDE", each.seq) for each in fold.kept if left.quarantines and not each.aside),
        *(("restores", "RESTORE", each.seq) for each in fold.kept if left.restores and each.aside),
        *(("verifications", "VERIFIED", each.seq) for each in fold.kept if left.verifications and not each.verified),
    ]
    for what, kind, seq in records if free else ():
        word = "quarantined" if kind == "SET_ASIDE" else ""
        sent = (state.log.end, Record(kind, OPERATOR, seqs=(seq,), word=word))
        yield Step(("operator", "sends", kind, seq), spend(state, what)._replace(net=state.net | {sent}))
    if left.late_puts:
        for key in sorted(state.deleted - state.objects):
            back = state._replace(objects=state.objects | {key}, returned=state.returned | {key})
            yield Step(("a PUT arrives late", key), spend(back, "late_puts"))
