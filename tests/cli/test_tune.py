"""`tune`: it recommends what a writer takes, ends in time, and leaves nothing behind."""

from dataclasses import replace

import pytest

from ckptstore.clock import SystemClock
from ckptstore.errors import AccessDeniedError, InvalidInputError, UnavailableError
from ckptstore.maintenance.tune import Bounds, Tried, fastest, fetch_choices, part_choices, tune
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.urls import open_store
from ckptstore.objectstore.wrappers.forwarding import ForwardingStore
from ckptstore.options import TransferOptions
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.units import MIB

SMALL = ("--sample-mib", "16")


def test_the_last_line_is_an_argument_that_a_writer_takes(ckptstore, tmp_path):
    ended = ckptstore("tune", tmp_path / "run", *SMALL)
    assert ended.code == 0
    name, equals, value = ended.lines[-1].partition("=")
    assert (name, equals) == ("transfer", "=")
    options = eval(value, {"TransferOptions": TransferOptions})  # noqa: S307  (what it prints is Python)
    assert options.part_bytes * options.parts_in_flight <= options.transfer_bytes == 64 * MIB
    assert options.fetch_bytes * options.fetches_in_flight <= 64 * MIB


def test_nothing_is_left_behind(ckptstore, tmp_path):
    url = tmp_path / "run"
    document = ckptstore("tune", url, "--json", *SMALL).json
    assert {each["way"] for each in document["tried"]} == {"save", "load"}
    assert all(each["mib_per_second"] > 0 for each in document["tried"])
    assert (document["complete"], document["left_behind"]) == (True, [])
    assert [*open_store(url).list("")] == []


@pytest.mark.servers
def test_it_tunes_for_a_bucket_and_leaves_it_empty(ckptstore, s3_url):
    document = ckptstore("tune", s3_url, "--json", "--seconds", "5", *SMALL).json
    assert document["tried"][0]["mib_per_second"] > 0
    store = open_store(s3_url)
    assert ([*store.list("")], [*store.list_uploads("")]) == ([], [])


def test_it_ends_when_its_time_is_up_and_says_so(ckptstore, tmp_path):
    ended = ckptstore("tune", tmp_path / "run", "--seconds", "0.001", *SMALL)
    assert ended.code == 0
    assert "Time was up" in ended.err
    assert ended.lines[-1].startswith("transfer=TransferOptions(")


def test_no_choice_needs_more_than_the_budget():
    base = replace(TransferOptions(), transfer_bytes=64 * MIB)
    assert max(each.part_bytes * each.parts_in_flight for each in part_choices(base)) == 64 * MIB
    assert max(each.fetch_bytes * each.fetches_in_flight for each in fetch_choices(base)) == 64 * MIB
    assert len(part_choices(replace(base, transfer_bytes=256 * MIB))) > len(part_choices(base))
    with pytest.raises(InvalidInputError):
        Bounds(transfer_bytes=8 * MIB)


def test_of_what_is_about_as_fast_the_cheapest_is_chosen():
    def tried(many, speed):
        return Tried("save", TransferOptions(parts_in_flight=many), speed)

    def cost(options):
        return options.parts_in_flight

    assert fastest([tried(2, 50.0), tried(4, 97.0), tried(8, 100.0)], cost).parts_in_flight == 4
    assert fastest([tried(2, None), tried(4, 10.0)], cost).parts_in_flight == 4
    assert fastest([tried(2, None)], cost) is None


def test_what_fails_with_many_connections_is_told_and_not_chosen():
    class Overwhelmed(ForwardingStore):
        def open_upload(self, key, *, size):  # noqa: ARG002
            raise UnavailableError("Too many.", hint="Fewer.")

    plain = MemoryStore("memory://run")
    tuning = tune(
        lambda options: Overwhelmed(plain) if options.parts_in_flight > 4 else plain,
        bounds=Bounds(sample_bytes=16 * MIB),
    )
    failed = [each for each in tuning.tried if each.mib_per_second is None]
    assert [(each.options.parts_in_flight, each.failure) for each in failed] == [(8, "Too many.")]
    assert tuning.best.parts_in_flight <= 4


class FailsLater(ForwardingStore):
    """Takes so many uploads, and no more."""

    def __init__(self, inner, many):
        super().__init__(inner)
        self.left = many

    def open_upload(self, key, *, size):
        self.left -= 1
        if self.left < 0:
            raise UnavailableError("Too many.", hint="Fewer.")
        return super().open_upload(key, size=size)


def test_what_fails_in_the_second_round_is_told_and_not_chosen():
    plain = MemoryStore("memory://run")
    tuning = tune(
        lambda options: FailsLater(plain, 1) if options.parts_in_flight <= 4 else plain,
        bounds=Bounds(sample_bytes=16 * MIB),
    )
    speeds = {each.options.parts_in_flight: each for each in tuning.tried if each.way == "save"}
    assert {many: each.failure for many, each in speeds.items()} == {2: "Too many.", 4: "Too many.", 8: ""}
    assert [many for many, each in speeds.items() if each.mib_per_second is None] == [2, 4]
    assert tuning.best.parts_in_flight == 8


def test_where_everything_fails_in_the_second_round_nothing_is_recommended():
    saves = FailsLater(MemoryStore("memory://run"), 7)
    with pytest.raises(UnavailableError, match="Too many"):
        tune(lambda _: saves, bounds=Bounds(sample_bytes=16 * MIB))
    assert [*saves.list("")] == []


@pytest.mark.parametrize("denied", ["put", "delete"])
def test_a_refusal_ends_it_before_anything_large_is_written(denied):
    store = FaultyStore(MemoryStore("memory://run"), lambda call: Fault.DENIED if call.operation == denied else None)
    with pytest.raises(AccessDeniedError):
        tune(lambda _: store)
    assert sum(info.size for info in store.list("")) <= 1


def test_an_interrupt_leaves_nothing_behind():
    class Interrupting(SystemClock):
        calls = 0

        def monotonic(self):
            self.calls += 1
            if self.calls == 8:
                raise KeyboardInterrupt
            return super().monotonic()

    store = MemoryStore("memory://run")
    with pytest.raises(KeyboardInterrupt):
        tune(lambda _: store, bounds=Bounds(sample_bytes=16 * MIB), clock=Interrupting())
    assert [*store.list("")] == []
