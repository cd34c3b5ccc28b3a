"""What has a place for each rank goes on there, is merged by a hook, or is refused; it never begins anew unsaid."""

import copy
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training.loaders import Collate, PerRank, check_world_size, choose, source_of
from ckptstore.training.sampler import ElasticSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),  # newer Pythons, of any threads
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11 on torch 2.13
]


class Stream:
    """A source without length: rank r of W reads the numbers r, r + W, r + 2 * W, ... and says how many it has read."""

    def __init__(self, rank, world_size, *, start=0):
        self.rank, self.world_size, self.start, self.read = rank, world_size, start, 0

    def __iter__(self):
        return self

    def __next__(self):
        number = self.start + self.rank + self.read * self.world_size
        self.read += 1
        return number

    def state_dict(self):
        return {"start": self.start, "read": self.read}

    def load_state_dict(self, state):
        self.start, self.read = state["start"], state["read"]


class Records(IterableDataset):
    """A dataset of a rank that is read as a stream, whose place torchdata asks each worker for."""

    def __init__(self, rank):
        self.rank, self.read = rank, 0

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker else (0, 1)
        while self.read * of + number < 100:
            self.read += 1
            yield 1000 * self.rank + (self.read - 1) * of + number

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


def states_of(streams):
    return [copy.deepcopy(PerRank(stream).state_dict()) for stream in streams]


def streams_at(*reads):
    """Return one stream for each rank, each of which has read so many."""
    streams = [Stream(rank, len(reads)) for rank in range(len(reads))]
    for stream, count in zip(streams, reads, strict=True):
        for _ in range(count):
            next(stream)
    return streams


def test_on_the_same_number_of_ranks_each_goes_on_at_its_own_place():
    streams = streams_at(3, 1, 4, 1)
    saved = states_of(streams)
    fresh = [PerRank(Stream(rank, 4)) for rank in range(4)]
    for rank, each in enumerate(fresh):
        each.load_state_dict(choose(saved, each, rank=rank, world_size=4))
    assert [next(each.stateful) for each in fresh] == [next(stream) for stream in streams] == [12, 5, 18, 7]


@pytest.mark.parametrize("now", [2, 3, 8, 1])
def test_another_number_of_ranks_is_refused_with_old_and_new(now):
    for rank in range(now):
        stream = Stream(rank, now)
        with pytest.raises(IncompatibleStateError) as refused:
            choose(states_of(streams_at(3, 1, 4, 1)), PerRank(stream), rank=rank, world_size=now, name="corpus")
        assert (refused.value.facts["saved_world_size"], refused.value.facts["world_size"]) == (4, now)
        assert f"corpus has a state for each of 4 ranks, and is resumed on {now} rank" in str(refused.value)
        assert "merge" in refused.value.hint
        assert stream.read == 0


@pytest.mark.parametrize("now", [2, 3, 8, 1])
def test_another_number_of_ranks_gives_the_hook_all_saved_states(now):
    saved, asked = states_of(streams_at(3, 3, 3, 3)), []

    def merge(states, rank, world_size):
        asked.append((list(states), rank, world_size))
        return {"start": sum(state["read"] for state in states), "read": 0}

    streams = [PerRank(Stream(rank, now), merge=merge) for rank in range(now)]
    for rank, stream in enumerate(streams):
        stream.load_state_dict(choose(saved, stream, rank=rank, world_size=now))
    assert asked == [(saved, rank, now) for rank in range(now)]
    assert sorted(next(stream.stateful) for stream in streams) == list(range(12, 12 + now))


def test_the_hook_is_not_asked_on_the_same_number_of_ranks():
    stream = PerRank(Stream(1, 2), merge=lambda *_: pytest.fail("asked"))
    assert choose([{"read": 1}, {"read": 2}], stream, rank=1, world_size=2) == {"read": 2}


def test_a_hook_that_returns_nothing_is_refused():
    stream = PerRank(Stream(0, 1), merge=lambda *_: None)
    with pytest.raises(InvalidInputError, match="returned None for rank 0 of 1"):
        choose([{}, {}], stream, rank=0, world_size=1)


def test_what_a_hook_raises_comes_as_it_is():
    def merge(*_):
        raise KeyError("shard 3")

    with pytest.raises(KeyError, match="shard 3"):
        choose([{}, {}], PerRank(Stream(0, 1), merge=merge), rank=0, world_size=1)


@pytest.mark.parametrize("rank", [-1, 2, True, None], ids=repr)
def test_a_rank_that_cannot_be_is_refused(rank):
    with pytest.raises(InvalidInputError):
        choose([{}, {}], PerRank(Stream(0, 1)), rank=rank, world_size=2)


def test_nothing_saved_is_refused():
    with pytest.raises(InvalidInputError, match="saved"):
        choose([], PerRank(Stream(0, 1)), rank=0, world_size=1)


def test_numbers_of_ranks_can_be_checked_before_a_state_is_read():
    check_world_size(PerRank(Stream(0, 1)), saved=4, now=4, name="corpus")
    check_world_size(PerRank(Stream(0, 1), merge=lambda *_: {}), saved=4, now=3, name="corpus")
    with pytest.raises(IncompatibleStateError, match=r"corpus .* 4 ranks, and is resumed on 3 ranks"):
        check_world_size(PerRank(Stream(0, 1)), saved=4, now=3, name="corpus")


def test_it_says_for_people_whose_count_it_is():
    assert PerRank(Stream(0, 1)).describe() == "Stream: each rank's own count; on another number of ranks refused"
    assert PerRank(Stream(0, 1), merge=lambda *_: {}).describe().endswith("merged by a hook")


def test_a_plain_loader_cannot_say_where_it_is_and_is_refused():
    for refused in (PerRank, lambda loader: source_of(loader, name="train")):
        with pytest.raises(InvalidInputError, match="DataLoader that cannot say where it is") as error:
            refused(DataLoader(range(10)))
        assert "ElasticSampler" in error.value.hint
        assert "StatefulDataLoader" in error.value.hint
    with pytest.raises(InvalidInputError, match="train is a list without state_dict"):
        source_of([1, 2], name="train")


def test_a_loader_over_an_elastic_sampler_is_where_its_sampler_is():
    sampler = ElasticSampler(10, batch_size=2)
    for kind in (DataLoader, StatefulDataLoader):
        loader = kind(range(10), batch_sampler=sampler)
        assert source_of(loader, name="train") is sampler
        with pytest.raises(InvalidInputError, match="both would count"):
            PerRank(loader)


def test_samplers_and_streams_say_themselves_where_they_are():
    sampler, stream = ElasticSampler(10, batch_size=2), Stream(0, 1)
    per_rank = PerRank(stream, merge=lambda *_: {})
    assert source_of(sampler, name="train") is sampler
    assert source_of(per_rank, name="train") is per_rank
    assert source_of(stream, name="train").stateful is stream


def test_a_hook_that_is_no_function_is_refused():
    with pytest.raises(InvalidInputError, match="merge"):
        PerRank(Stream(0, 1), merge="mean")


def torchdata_loader(rank, kind, workers):
    if kind == "stream":
        return StatefulDataLoader(Records(rank), batch_size=5, num_workers=workers)
    return StatefulDataLoader(
        range(1000 * rank, 1000 * rank + 200),
        batch_size=5,
        shuffle=True,
        generator=torch.Generator().manual_seed(rank),
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_torchdatas_loader_goes_on_with_the_batch_after_the_last_one_trained_on(kind, workers):
    unbroken = [[batch.tolist() for batch in torchdata_loader(rank, kind, workers)] for rank in (0, 1)]
    saved, trained = [], ([], [])
    for rank in (0, 1):
        loader = torchdata_loader(rank, kind, workers)
        for batch in loader:
            trained[rank].append(batch.tolist())
            if len(trained[rank]) == 7 + rank:
                saved.append(copy.deepcopy(PerRank(loader).state_dict()))
                break
    for rank in (0, 1):
        loader = PerRank(torchdata_loader(rank, kind, workers))
        loader.load_state_dict(choose(saved, loader, rank=rank, world_size=2))
        trained[rank].extend(batch.tolist() for batch in loader.stateful)
        assert trained[rank] == unbroken[rank]
        assert len({sample for batch in unbroken[rank] for sample in batch}) in (100, 200)
    with pytest.raises(IncompatibleStateError):
        choose(saved, loader, rank=0, world_size=1)


Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024  (what users have)


@pytest.mark.parametrize(
    ("sample", "empty"),
    [
        (torch.ones(3, dtype=torch.bfloat16), torch.zeros(0, 3, dtype=torch.bfloat16)),
        (3, torch.zeros(0, dtype=torch.int64)),
        ((torch.ones(2, 2), 1), [torch.zeros(0, 2, 2), torch.zeros(0, dtype=torch.int64)]),
        ({"x": torch.ones(2), "name": "a"}, {"x": torch.zeros(0, 2), "name": []}),
        (OrderedDict(x=1.0), OrderedDict(x=torch.zeros(0, dtype=torch.float64))),
        (Pair(1, {"z": 2}), Pair(torch.zeros(0, dtype=torch.int64), {"z": torch.zeros(0, dtype=torch.int64)})),
    ],
    ids=["tensor", "int", "tuple", "dict", "OrderedDict", "namedtuple"],
)
def test_a_batch_of_no_samples_is_like_every_other_without_rows(sample, empty):
    collate = Collate(sample)
    made = collate([])
    assert type(made) is type(empty) is type(collate([sample, sample]))
    torch.testing.assert_close(made, empty, rtol=0, atol=0)


def test_a_batch_of_samples_is_what_the_users_own_function_makes_of_it():
    collate = Collate(2, collate=lambda samples: {"sum": torch.tensor(sum(samples)), "all": torch.tensor(samples)})
    assert collate([1, 2, 3])["all"].tolist() == [1, 2, 3]
    assert collate([])["all"].tolist() == []


def test_a_batch_that_cannot_be_without_rows_is_refused_before_training():
    with pytest.raises(UnsupportedError, match="object"):
        Collate(1, collate=lambda _: object())
