"""Signed records: who can write to the bucket and has no key can make nobody believe anything."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3
from run_samples import Job, a_run, append_raw, body_of, carried, opened, sealed
from signing_samples import (
    OPERATOR,
    REQUIRED,
    STRANGER,
    TRAINER,
    TRUSTED,
    a_signed_run,
    forge_commit,
    move,
    public_of,
    signs,
    slots,
    strip_signature,
)

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.layout import slot_key, state_key
from ckptstore.format.records import FOLD_EVERY, Pin, decode_record
from ckptstore.format.seal import SEAL_BYTES, signer_of
from ckptstore.format.trace import decode_trace
from ckptstore.maintenance.collect import collect, retire
from ckptstore.maintenance.collect_plan import plan_collection
from ckptstore.maintenance.rebuild import Copy, LeftOut, copies
from ckptstore.maintenance.repair import Repair
from ckptstore.maintenance.scrub import Scrub
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.protocol.attempt import Description, begin
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.traces import read_trace, write_trace
from ckptstore.protocol.verify import readable_records
from ckptstore.signing import RECORD, TRACE, Signing


def names(store, options=None):
    return [each.commit.checkpoint_id for each in opened(store, options=options).checkpoints()]


def test_a_signed_run_is_read_by_who_requires_it_by_who_does_not_and_as_json():
    store, job = a_signed_run(2)
    for options in (None, REQUIRED, LogOptions(signing=Signing(trusted=TRUSTED[:1]))):
        assert names(store, options) == ["step-1", "step-2"]
    for key in slots(store):
        body = body_of(store, key)
        value = json.loads(body)
        assert list(value)[-3:] == ["signature", "signed_by", "self"]
        assert signer_of(body) == value["signed_by"] == TRUSTED[0].hex()
        assert value["self"] == blake3(body[:-SEAL_BYTES]).hexdigest()
    assert signer_of(body_of(a_run(1)[0], slot_key(1))) is None
    assert job.catalog.pin(1, holder="eval", reason="") is not None


def test_the_same_record_has_the_same_signature():
    signing = Signing(key=TRAINER)
    same = [signing.sign(b"head", domain=domain) for domain in (RECORD, RECORD, TRACE)]
    assert same[0] == same[1] != same[2]


def test_several_keys_may_sign_one_run_in_turn():
    store, _ = a_signed_run(1)
    Job(store, job="job", options=signs(OPERATOR, trusted=TRUSTED)).save("step-2", step=2)
    assert names(store, REQUIRED) == ["step-1", "step-2"]
    with pytest.raises(IntegrityError, match="is not trusted"):
        opened(store, options=LogOptions(signing=Signing(trusted=TRUSTED[:1])))


def appended_commit(store):
    forge_commit(store)


def appended_pin(store):
    append_raw(store, kind="PIN", target=1, holder="x", reason="")


def appended_later_release(store):
    append_raw(store, kind="MERGE", optional=True)


def replaced_tail(store):
    key = slots(store)[-1]
    value = json.loads(body_of(store, key))
    value["metrics"] = {"loss": 0.0}
    del value["signature"], value["signed_by"]
    store.put(key, sealed(value))


def changed_under_its_signature(store):
    key = slots(store)[-1]
    value = json.loads(body_of(store, key))
    value["global_step"] = 77
    signature = {name: value.pop(name) for name in ("signature", "signed_by", "self")}
    head = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    head += b',"signature":"%s","signed_by":"%s"' % (signature["signature"].encode(), signature["signed_by"].encode())
    store.put(key, head + b',"self":"' + blake3(head).hexdigest().encode() + b'"}\n')


def signature_stripped_everywhere(store):
    for key in slots(store):
        strip_signature(store, key)


def signature_stripped_at_the_end(store):
    strip_signature(store, slots(store)[-1])


def replayed_in_the_next_slot(store):
    move(store, slots(store)[-1], len(slots(store)))


def replayed_from_another_run(store):
    other, _ = a_signed_run(9)
    move(other, slots(other)[-1], len(slots(store)), to=store)


def replayed_whole_from_another_run(store):
    other, _ = a_signed_run(9)
    for seq, key in enumerate(slots(other)):
        move(other, key, seq, to=store)


def signed_by_a_stranger(store):
    Job(store, options=signs(STRANGER, trusted=(public_of(STRANGER), *TRUSTED))).save("forged", step=99)


def run_json_swapped(store):
    store.put("run.json", body_of(a_signed_run(1)[0], "run.json"))


FORGERIES = [
    appended_commit,
    appended_pin,
    appended_later_release,
    replaced_tail,
    changed_under_its_signature,
    signature_stripped_everywhere,
    signature_stripped_at_the_end,
    replayed_in_the_next_slot,
    replayed_from_another_run,
    replayed_whole_from_another_run,
    signed_by_a_stranger,
    run_json_swapped,
]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_forged_log_is_refused_and_what_stands_before_the_forgery_can_be_shown(forge):
    store, _ = a_signed_run(3)
    right = {body_of(store, key) for key in slots(store)}
    forge(store)
    with pytest.raises(IntegrityError):
        opened(store, options=REQUIRED)
    assert {entry.body for entry in readable_records(store, signing=REQUIRED.signing)} <= right


@pytest.mark.parametrize("forge", [appended_commit, appended_pin, appended_later_release], ids=lambda f: f.__name__)
def test_an_open_log_refuses_what_is_forged_above_it_and_appends_nothing(forge):
    store, job = a_signed_run(2)
    reader = opened(store, options=REQUIRED)
    forge(store)
    before = slots(store)
    with pytest.raises(IntegrityError, match="is not signed"):
        reader.checkpoints()
    with pytest.raises(IntegrityError, match="is not signed"):
        job.log.append(lambda _: Pin(1, "eval", ""))
    with pytest.raises(IntegrityError, match="is not signed"):
        job.save("step-3", step=3)
    assert slots(store) == before


def test_without_trusted_keys_a_forged_commit_is_a_commit():
    store, _ = a_signed_run(2)
    forge_commit(store)
    assert names(store) == ["step-1", "step-2", "step-2"]


def test_a_flipped_bit_in_a_signature_is_found_by_who_has_no_keys():
    store, _ = a_signed_run(1)
    key = slots(store)[-1]
    body = body_of(store, key)
    start = body.rindex(b',"signature":')
    for at in range(start, len(body) - SEAL_BYTES):
        for bit in (0, 3, 7):
            flipped = bytearray(body)
            flipped[at] ^= 1 << bit
            with pytest.raises(IntegrityError):
                decode_record(bytes(flipped), seq=1, run=json.loads(body)["run"])


def test_nothing_of_an_unsigned_record_is_parsed(monkeypatch):
    store, _ = a_signed_run(1)
    key = slots(store)[-1]
    strip_signature(store, key)

    def parse(*_, **__):
        raise AssertionError

    monkeypatch.setattr("ckptstore.format.records.parse_json", parse)
    with pytest.raises(IntegrityError, match="is not signed"):
        decode_record(body_of(store, key), seq=1, run="x", signing=REQUIRED.signing)


def long_run(options, saves=FOLD_EVERY + 6):
    job = Job(MemoryStore(), options=options)
    job.save("step-0")
    for number in range(saves):
        job.catalog.pin(1, holder=f"holder-{number}", reason="")
    return job.store


def test_a_snapshot_counts_only_below_a_signed_record():
    """The fold's hash stands in the record above it; that record is checked before its hash is believed (I10)."""
    store = long_run(signs(TRAINER, trusted=TRUSTED))
    right = names(store, REQUIRED)
    state = json.loads(body_of(store, state_key(FOLD_EVERY)))
    state["commits"][0]["commit"]["global_step"] = 77
    forged = json.dumps(state, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    store.put(state_key(FOLD_EVERY), forged)
    assert names(store, REQUIRED) == right  # passed over: its hash is not in the record
    assert opened(store, options=REQUIRED).checkpoints()[0].commit.global_step == 0

    value = json.loads(body_of(store, slot_key(FOLD_EVERY)))
    value["fold"] = blake3(forged).hexdigest()
    store.put(slot_key(FOLD_EVERY), sealed(value))  # now it is, and the record is signed by nobody
    with pytest.raises(IntegrityError, match="signed"):
        opened(store, options=REQUIRED)


def mixed_run():
    """Return a run that began without signatures, and the first slot that is signed."""
    store, _ = a_run(2)
    first = len(slots(store))
    Job(store, options=signs(TRAINER)).save("step-3", step=3)
    return store, first


def test_a_run_that_began_unsigned_is_read_from_its_first_signed_slot_on():
    store, first = mixed_run()
    with pytest.raises(IntegrityError, match="is not signed") as caught:
        opened(store, options=REQUIRED)
    assert "signed_from" in caught.value.hint
    options = LogOptions(signing=Signing(trusted=TRUSTED, signed_from=first))
    assert names(store, options) == ["step-1", "step-2", "step-3"]
    with pytest.raises(IntegrityError, match="is not signed"):
        opened(store, options=LogOptions(signing=Signing(trusted=TRUSTED, signed_from=first - 1)))


def test_what_was_not_signed_is_believed_only_below_a_signed_record():
    options = LogOptions(signing=Signing(trusted=TRUSTED, signed_from=mixed_run()[1]))
    changed, first = mixed_run()
    value = json.loads(body_of(changed, slot_key(1)))
    value["global_step"] = 77
    changed.put(slot_key(1), sealed(value))
    with pytest.raises(IntegrityError, match="does not follow"):
        opened(changed, options=options)

    cut, first = mixed_run()
    for key in slots(cut)[first:]:
        cut.delete(key)
    cut.delete("latest.json")
    with pytest.raises(IntegrityError, match="ends before"):
        opened(cut, options=options)

    emptied = MemoryStore()
    with pytest.raises(IntegrityError, match="ends before"):
        opened(emptied, options=options)


def test_a_deleted_tail_is_not_found_by_signatures():
    """What SECURITY.md says is not covered: an older log is a whole log."""
    store, _ = a_signed_run(3)
    store.delete(slots(store)[-1])
    assert names(store, REQUIRED) == ["step-1", "step-2"]
    assert opened(store, options=REQUIRED).log.lost_from is not None


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"key": b"short"}, "32 bytes"),
        ({"key": "x" * 32}, "32 bytes"),
        ({"trusted": (b"\0" * 31,)}, "32 bytes"),
        ({"trusted": TRUSTED, "signed_from": -1}, "slot"),
        ({"trusted": TRUSTED, "signed_from": True}, "slot"),
        ({"signed_from": 3}, "without trusted"),
        ({"key": STRANGER, "trusted": TRUSTED}, "not among"),
    ],
    ids=["short", "text", "trusted", "negative", "flag", "nobody", "own"],
)
def test_keys_that_cannot_be_meant_are_refused(given, match):
    with pytest.raises(InvalidInputError, match=match):
        Signing(**given)


def test_a_private_key_is_carried_by_a_pickle_and_shown_nowhere():
    secret = bytes(range(32))
    options = signs(secret, trusted=(public_of(secret),))
    assert carried(options) == options
    shown = f"{options!r} {options} {options.signing!r}"
    assert secret.hex() not in shown
    assert repr(secret)[2:-1] not in shown
    for wrong in (secret, secret.hex()):
        with pytest.raises(InvalidInputError) as caught:
            LogOptions(signing=wrong)
        assert secret.hex() not in f"{caught.value!r}{caught.value.facts}"
        assert repr(secret)[2:-1] not in f"{caught.value!r}{caught.value.facts}"


def test_a_trace_is_signed_like_the_record_that_it_follows():
    store, job = a_signed_run(1)
    committed = job.catalog.latest()
    write_trace(job.log, committed, {"loss": [1.0]})
    assert read_trace(store, committed, signing=REQUIRED.signing) == read_trace(store, committed) == {"loss": [1.0]}
    key = committed.commit.stem.trace_key
    right = body_of(store, key)
    value = json.loads(right)
    del value["signature"], value["signed_by"]
    store.put(key, sealed(value))
    assert read_trace(store, committed) == {"loss": [1.0]}
    with pytest.raises(IntegrityError, match="is not signed"):
        read_trace(store, committed, signing=REQUIRED.signing)
    store.put(key, right.replace(b"1.0", b"2.0"))
    with pytest.raises(IntegrityError):
        read_trace(store, committed, signing=REQUIRED.signing)


def test_a_signed_record_is_no_signed_trace_and_the_other_way_round():
    store, job = a_signed_run(1)
    committed = job.catalog.latest()
    write_trace(job.log, committed, {})
    trace = body_of(store, committed.commit.stem.trace_key)
    for body, read in (
        (trace, lambda body: decode_record(body, seq=1, run=job.log.run, signing=REQUIRED.signing)),
        (
            body_of(store, slot_key(1)),
            lambda body: decode_trace(body, seq=1, record_blake3="", key="x", signing=REQUIRED.signing),
        ),
    ):
        with pytest.raises(IntegrityError, match="did not make for it"):
            read(body)


def test_the_largest_commit_still_fits_with_a_signature():
    job = Job(MemoryStore(), options=signs(TRAINER))
    most = Description(1, training_state={"x": "y" * (16 * 1024 - 60)})
    assert begin(job.log, job.incarnation, checkpoint_id="n" * 120, world_size=4, description=most).world_size == 4


def test_a_log_is_rebuilt_from_signed_copies_alone():
    store, job = a_signed_run(2)
    first, second = (each.commit.stem.committed_key for each in job.catalog.checkpoints())
    strip_signature(store, second)
    found = list(copies(RunLog.open(store, options=REQUIRED)))
    assert [each.committed.seq for each in found if isinstance(each, Copy)] == [1]
    assert [each.key for each in found if isinstance(each, LeftOut)] == [second]
    assert len([each for each in copies(RunLog.open(store)) if isinstance(each, Copy)]) == 2
    assert first != second


def test_who_has_no_key_appends_nothing_to_what_is_or_must_be_signed():
    store, _ = a_signed_run(1)
    unsigned, _ = a_run(1)
    signs_from_2 = LogOptions(signing=Signing(trusted=TRUSTED, signed_from=2))
    for place, options in ((store, LogOptions()), (store, REQUIRED), (unsigned, signs_from_2)):
        before = slots(place)
        log = RunLog.open(place, options=LogOptions() if place is unsigned else options)
        log.options = options
        with pytest.raises(InvalidInputError, match="no key to sign with") as refused:
            log.append(lambda _: Pin(1, "eval", ""))
        assert "CKPTSTORE_SIGNING_KEY_FILE" in refused.value.hint
        assert slots(place) == before
    Job(unsigned, job="job", options=signs(TRAINER)).save("step-2", step=2)  # from here on it is signed
    with pytest.raises(InvalidInputError, match="is signed, and there is no key"):
        RunLog.open(unsigned).append(lambda _: Pin(1, "eval", ""))


def test_who_has_no_key_begins_no_run_that_must_be_signed():
    store = MemoryStore()
    with pytest.raises(InvalidInputError, match="no key to sign with"):
        RunLog.create(store, options=REQUIRED)
    assert [*store.list("")] == []


def test_who_has_no_key_collects_notes_and_rebuilds_nothing_of_a_signed_run():
    store, job = a_signed_run(4)
    retire(job.log, [1, 2], reason="old")
    keyless = RunLog.open(store)
    plan = plan_collection(keyless, grace_seconds=0)
    before = [info.key for info in store.list("")]
    with pytest.raises(InvalidInputError, match="no key to sign with"):
        collect(keyless, digest=plan.digest, grace_seconds=0)
    with pytest.raises(InvalidInputError, match="no key to sign with"):
        Scrub(keyless, options=TransferOptions(), again=lambda: store).check_may_note()
    assert [info.key for info in store.list("")] == before
    assert collect(job.log, digest=plan.digest, grace_seconds=0).collected == [1, 2]
    for info in [*store.list("log/"), *store.list("state/")]:
        store.delete(info.key)
    repair = Repair(RunLog.open(store), options=TransferOptions(), again=lambda: store)
    with pytest.raises(InvalidInputError, match="The copies are signed"):
        repair.rebuild_log(repair.rebuilding())
    assert slots(store) == []


def test_what_an_operator_with_a_key_appends_to_an_unsigned_run_is_not_signed_and_a_job_signs_from_its_claim():
    store, job = a_run(1)
    pin = lambda holder: lambda _: Pin(1, holder, "")  # noqa: E731
    RunLog.open(store, options=signs(OPERATOR)).append(pin("eval"))
    job.save("step-2", step=2)  # who has no key still may
    assert [signer_of(body_of(store, key)) for key in slots(store)] == [None] * 4
    Job(store, options=signs(TRAINER)).save("step-3", step=3)
    assert [signer_of(body_of(store, key)) for key in slots(store)[4:]] == [TRUSTED[0].hex()] * 2
    RunLog.open(store, options=signs(TRAINER)).append(pin("later"))
    assert signer_of(body_of(store, slots(store)[-1])) == TRUSTED[0].hex()


def test_another_key_than_the_last_one_s_signs_only_beside_the_trusted_ones():
    store, _ = a_signed_run(1)
    with pytest.raises(InvalidInputError, match="the key here is that of"):
        RunLog.open(store, options=signs(OPERATOR)).append(lambda _: Pin(1, "eval", ""))
    assert RunLog.open(store, options=signs(OPERATOR, trusted=TRUSTED)).append(lambda _: Pin(1, "eval", "")) is not None
