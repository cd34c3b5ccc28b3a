"""Every sample once per epoch, in one order, whatever the ranks, the batch size, the prefetching and the stops."""

import itertools
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from ckptstore.errors import IncompatibleStateError, InvalidInputError
from ckptstore.training.loaders import Collate
from ckptstore.training.order import EpochOrder
from ckptstore.training.progress import Progress
from ckptstore.training.sampler import BLOCK_SAMPLES, ElasticSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # newer Pythons, of any threads


class Ids(Dataset):
    """A dataset whose samples are their own numbers."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def order_of(length, *, epochs, seed=0):
    """Return the samples of the first epochs, in order."""
    return [EpochOrder(length=length, seed=seed, epoch=epoch).at(0, length).tolist() for epoch in range(epochs)]


def fetched(sampler, ahead):
    """Return the batches of a sampler, of which up to `ahead` are asked for before they are used."""
    source, queue = iter(sampler), deque()
    while True:
        queue.extend(itertools.islice(source, ahead + 1 - len(queue)))
        if not queue:
            return
        yield queue.popleft()


def train(state, length, *, ranks, batches, ahead=0, **options):
    """Train all ranks for some batches from a state; return (epoch, shares by rank) of each batch, and the state."""
    samplers = [ElasticSampler(length, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    done = []
    while len(done) < batches:
        assert len(samplers[0]) > 0  # else this never ends
        for shares in zip(*(fetched(sampler, ahead) for sampler in samplers), strict=True):
            done.append((samplers[0].epoch, shares))
            size = sum(map(len, shares))
            assert {sampler.batch_samples for sampler in samplers} == {size}
            assert {sampler.advance() for sampler in samplers} == {size}
            if len(done) == batches:
                break
    states = [sampler.state_dict() for sampler in samplers]
    assert all(each == states[0] for each in states)
    return done, states[0]


def samples_of(done, epoch):
    return [sample for at, shares in done if at == epoch for share in shares for sample in share]


def loaders_of(ranks, *, state, workers=2):
    """Return the samplers of all ranks at a state, and loaders whose workers fetch four batches beforehand each."""
    samplers = [ElasticSampler(1000, batch_size=20, rank=rank, world_size=ranks, seed=7) for rank in range(ranks)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    return samplers, [
        DataLoader(Ids(1000), batch_sampler=sampler, num_workers=workers, prefetch_factor=4, persistent_workers=True)
        for sampler in samplers
    ]


@pytest.mark.parametrize("stops", [[], [30], [30, 40], [30, 40, 70]], ids=lambda stops: f"{len(stops)} resumes")
def test_resumes_amid_prefetching_workers_change_nothing_in_the_order(stops):
    state, trained = None, []
    for stop in [*stops, 100]:
        samplers, loaders = loaders_of(2, state=state)
        while len(trained) < stop:
            for shares in zip(*loaders, strict=True):
                trained.append([sample for share in shares for sample in share.tolist()])
                assert {sampler.advance() for sampler in samplers} == {20}
                if len(trained) == stop:
                    break
        assert samplers[0].state_dict() == samplers[1].state_dict()
        state = samplers[0].state_dict()
        assert (state["epoch"], state["cursor"]) == divmod(stop * 20, 1000)
    first, second = (list(itertools.chain(*half)) for half in (trained[:50], trained[50:]))
    assert sorted(first) == sorted(second) == list(range(1000))
    assert [first, second] == order_of(1000, epochs=2, seed=7)


def test_the_cursor_is_that_of_the_batch_trained_on_however_much_was_fetched():
    asked = 0

    class Counted(ElasticSampler):
        def __iter__(self):
            nonlocal asked
            for share in super().__iter__():
                asked += 1
                yield share

    sampler = Counted(1000, batch_size=10, rank=0, world_size=1)
    loader = DataLoader(Ids(1000), batch_sampler=sampler, num_workers=2, prefetch_factor=4)
    for trained, _ in enumerate(loader):
        assert sampler.state_dict()["cursor"] == sampler.position == trained * 10
        assert asked >= trained + 8
        assert sampler.advance() == 10
        assert sampler.state_dict()["cursor"] == sampler.position == (trained + 1) * 10
        if trained == 20:
            break
    again = ElasticSampler(1000, batch_size=10, rank=0, world_size=1)
    again.load_state_dict(sampler.state_dict())
    assert next(iter(again)) == order_of(1000, epochs=1)[0][210:220]


def test_ten_thousand_and_seven_samples_go_over_4_3_5_and_4_ranks_once_per_epoch():
    state, done = None, []
    for ranks, batches in ((4, 100), (3, 100), (5, 90), (4, 44)):
        part, state = train(state, 10_007, ranks=ranks, batches=batches, batch_size=60, ahead=8)
        done += part
    assert [samples_of(done, epoch) for epoch in (0, 1)] == order_of(10_007, epochs=2)
    assert sorted(samples_of(done, 1)) == list(range(10_007))
    assert (state["epoch"], state["cursor"]) == (2, 0)
    sizes = [[len(share) for share in shares] for _, shares in done]
    assert {number for number, each in enumerate(sizes) if len(set(each)) > 1 or sum(each) != 60} == {166, 333}
    assert (sizes[166], sizes[333]) == ([15, 16, 16], [11, 12, 12, 12])


def test_an_empty_share_is_given_so_that_every_rank_joins():
    done, state = train(None, 62, ranks=5, batches=3, batch_size=60)
    assert [[len(share) for share in shares] for _, shares in done] == [[12] * 5, [0, 0, 1, 0, 1], [12] * 5]
    assert samples_of(done, 0) == order_of(62, epochs=1)[0]
    assert (state["epoch"], state["cursor"]) == (1, 60)


def test_gradients_weighted_by_samples_are_those_of_the_whole_batch_though_a_rank_has_none():
    dataset = [(torch.tensor([float(number), 1.0]), torch.tensor(number % 3)) for number in range(62)]
    weights = torch.linspace(-1, 1, 6).reshape(3, 2)
    gradients, sizes = [], set()
    for rank in range(5):
        layer = torch.nn.Linear(2, 3, bias=False)
        layer.weight.data.copy_(weights)
        sampler = ElasticSampler(dataset, batch_size=60, rank=rank, world_size=5)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=Collate(dataset[0]))
        for inputs, labels in loader:
            layer.zero_grad()
            total = torch.nn.functional.cross_entropy(layer(inputs), labels, reduction="sum")
            (total * 5 / sampler.batch_samples).backward()
            sizes.add((len(inputs), sampler.batch_samples))
            sampler.advance()
        gradients.append(layer.weight.grad)
    assert sizes == {(12, 60), (0, 2), (1, 2)}
    last = [dataset[sample] for sample in order_of(62, epochs=1)[0][60:]]
    layer = torch.nn.Linear(2, 3, bias=False)
    layer.weight.data.copy_(weights)
    inputs, labels = (torch.stack(column) for column in zip(*last, strict=True))
    torch.nn.functional.cross_entropy(layer(inputs), labels).backward()
    assert torch.allclose(torch.stack(gradients).mean(0), layer.weight.grad)


def test_another_batch_size_goes_on_exactly():
    first, state = train(None, 1000, ranks=2, batches=7, batch_size=64, ahead=3)
    assert state["cursor"] == 448
    second, state = train(state, 1000, ranks=3, batches=4, batch_size=100, ahead=3)
    third, state = train(state, 1000, ranks=1, batches=22, batch_size=7)
    assert [len(samples_of(part, 0)) for part in (first, second, third)] == [448, 400, 152]
    assert samples_of([*first, *second, *third], 0) == order_of(1000, epochs=1)[0]
    assert (state["epoch"], state["cursor"]) == (1, 0)


def test_a_state_saved_exactly_at_an_epochs_end_begins_the_next_one():
    first, state = train(None, 100, ranks=2, batches=5, batch_size=20, ahead=9)
    assert (state["epoch"], state["cursor"]) == (1, 0)
    second, state = train(state, 100, ranks=4, batches=5, batch_size=20, ahead=9)
    assert (state["epoch"], state["cursor"]) == (2, 0)
    assert [samples_of(first, 0), samples_of(second, 1)] == order_of(100, epochs=2)


def test_drop_last_leaves_what_cannot_fill_a_batch_and_begins_the_next_epoch():
    sampler = ElasticSampler(1000, batch_size=60, rank=0, world_size=1, drop_last=True)
    assert len(sampler) == 16
    done, state = train(None, 1000, ranks=4, batches=32, batch_size=60, drop_last=True, ahead=3)
    assert {len(share) for _, shares in done for share in shares} == {15}
    assert [samples_of(done, epoch) for epoch in (0, 1)] == [each[:960] for each in order_of(1000, epochs=2)]
    assert (state["epoch"], state["cursor"]) == (2, 0)


def test_drop_last_leaves_a_rest_that_is_too_short_for_the_batch_size_on_resume():
    _, state = train(None, 1000, ranks=1, batches=19, batch_size=50, drop_last=True)
    assert (state["epoch"], state["cursor"]) == (0, 950)
    sampler = ElasticSampler(1000, batch_size=60, rank=0, world_size=1, drop_last=True)
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.position, next(iter(sampler))) == (1, 0, order_of(1000, epochs=2)[1][:60])
    whole = ElasticSampler(1000, batch_size=60, rank=0, world_size=1)
    whole.load_state_dict(state)
    assert list(whole) == [order_of(1000, epochs=1)[0][950:]]


LEGS = st.lists(
    st.fixed_dictionaries(
        {
            "ranks": st.integers(1, 6),
            "batch_size": st.integers(1, 40),
            "batches": st.integers(0, 12),
            "ahead": st.integers(0, 9),
        }
    ),
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 120), seed=st.integers(0, 2**64 - 1), shuffle=st.booleans(), legs=LEGS)
def test_any_ranks_batch_sizes_and_stops_give_every_sample_once_per_epoch_in_one_order(length, seed, shuffle, legs):
    state, done = None, []
    for leg in legs:
        part, state = train(state, length, seed=seed, shuffle=shuffle, **leg)
        done += part
    while state is None or state["cursor"]:
        part, state = train(state, length, ranks=2, batches=1, batch_size=25, seed=seed, shuffle=shuffle)
        done += part
    expected = order_of(length, epochs=state["epoch"], seed=seed) if shuffle else [list(range(length))] * state["epoch"]
    assert [samples_of(done, epoch) for epoch in range(state["epoch"])] == expected


@settings(max_examples=20, deadline=None)
@given(length=st.integers(40, 120), legs=LEGS)
def test_with_drop_last_no_sample_comes_twice_and_less_than_a_batch_is_left(length, legs):
    state, done = None, []
    for leg in legs:
        part, state = train(state, length, drop_last=True, **leg)
        done += part
    for epoch, order in enumerate(order_of(length, epochs=state["epoch"] if state else 0)):
        seen = samples_of(done, epoch)
        assert seen == order[: len(seen)]
        assert length - len(seen) < max(leg["batch_size"] for leg in legs)


def test_batches_are_the_same_where_the_look_up_goes_from_block_to_block():
    sampler = ElasticSampler(3 * BLOCK_SAMPLES, batch_size=1000, rank=1, world_size=3)
    order = order_of(3 * BLOCK_SAMPLES, epochs=1)[0]
    shares = list(sampler)
    assert shares[:-1] == [order[at + 333 : at + 666] for at in range(0, 24_000, 1000)]
    assert shares[-1] == order[24_000 + 192 : 24_000 + 384]
    assert all(type(sample) is int for sample in shares[0])


def test_a_hundred_million_samples_are_not_held():
    sampler = ElasticSampler(10**8, batch_size=4096, rank=3, world_size=8)
    share = next(iter(sampler))
    assert share == EpochOrder(length=10**8, seed=0, epoch=0).at(3 * 512, 4 * 512).tolist()


def test_iterating_again_goes_on_at_the_cursor():
    sampler = ElasticSampler(10, batch_size=4, rank=0, world_size=1, shuffle=False)
    assert list(sampler) == list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sampler.advance()
    assert list(sampler) == [[4, 5, 6, 7], [8, 9]]
    assert (len(sampler), sampler.batch_samples) == (2, 4)


def test_progress_counts_samples_over_epochs():
    sampler, progress = ElasticSampler(10, batch_size=4, rank=0, world_size=1), Progress(global_step=5)
    for _ in range(2):
        for _ in sampler:
            sampler.advance(progress=progress)
    assert progress == Progress(global_step=5, epoch=2, consumed_samples=20)


def test_several_batches_count_at_once_where_the_number_of_samples_is_known():
    sampler = ElasticSampler(10, batch_size=2, rank=0, world_size=1)
    batches = iter(sampler)
    next(batches), next(batches), next(batches)
    assert sampler.advance(4) == 4
    assert sampler.advance(2) == 2
    list(batches)
    assert sampler.advance(4) == 4
    assert (sampler.epoch, sampler.position) == (1, 0)


@pytest.mark.parametrize("samples", [0, -2, 3, 12, True, 2.0, "2"], ids=repr)
def test_what_cannot_have_been_trained_on_is_refused_and_nothing_moves(samples):
    sampler, progress = ElasticSampler(10, batch_size=2, rank=0, world_size=1), Progress()
    list(sampler)
    with pytest.raises(InvalidInputError):
        sampler.advance(samples, progress=progress)
    assert (sampler.position, progress) == (0, Progress())


def test_a_batch_that_is_counted_twice_is_noticed():
    sampler = ElasticSampler(10, batch_size=2, rank=0, world_size=1)
    next(iter(sampler))
    sampler.advance()
    with pytest.raises(InvalidInputError, match="4 samples of epoch 0 would be trained on, and 2 were given out"):
        sampler.advance()


def test_a_rank_that_gets_its_batches_from_another_one_counts_along():
    sampler = ElasticSampler(10, batch_size=5, rank=0, world_size=1)
    assert [sampler.advance() for _ in range(4)] == [5] * 4
    assert (sampler.epoch, sampler.position) == (2, 0)


def test_an_iteration_from_before_a_resume_does_not_go_on():
    sampler = ElasticSampler(10, batch_size=2, rank=0, world_size=1)
    before = iter(sampler)
    next(before)
    sampler.load_state_dict({**sampler.state_dict(), "cursor": 6})
    with pytest.raises(InvalidInputError, match="was restored"):
        next(before)
    assert len(list(sampler)) == 2


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        ({"dataset": 900}, {"length": [1000, 900]}),
        ({"seed": 8}, {"seed": [7, 8]}),
        ({"shuffle": False}, {"shuffle": [True, False]}),
        ({"dataset": 999, "seed": 1}, {"length": [1000, 999], "seed": [7, 1]}),
    ],
    ids="-".join,
)
def test_another_order_is_refused_with_old_and_new(other, differences):
    given_ = {"dataset": 1000, "seed": 7, "shuffle": True}
    state = {**ElasticSampler(1000, batch_size=10, seed=7).state_dict(), "epoch": 3, "cursor": 20}
    sampler = ElasticSampler(**{**given_, **other}, batch_size=10)
    with pytest.raises(IncompatibleStateError) as refused:
        sampler.load_state_dict(state)
    assert refused.value.facts["differences"] == differences
    assert all(f"{name} was {old} and is {new}" in str(refused.value) for name, (old, new) in differences.items())
    assert (sampler.epoch, sampler.position) == (0, 0)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (None, IncompatibleStateError),
        ({}, IncompatibleStateError),
        ({"extra": 1}, IncompatibleStateError),
        ({"cursor": 10}, InvalidInputError),
        ({"cursor": -1}, InvalidInputError),
        ({"cursor": 1.0}, InvalidInputError),
        ({"epoch": True}, InvalidInputError),
        ({"shuffle": 1}, IncompatibleStateError),
        ({"order": "another/1"}, IncompatibleStateError),
    ],
)
def test_a_state_that_cannot_be_is_refused_and_nothing_moves(state, error):
    sampler = ElasticSampler(10, batch_size=2, rank=0, world_size=1)
    next(iter(sampler))
    sampler.advance()
    with pytest.raises(error):
        sampler.load_state_dict({**sampler.state_dict(), **state} if state else state)
    assert (sampler.epoch, sampler.position) == (0, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dataset": 0},
        {"dataset": -1},
        {"dataset": True},
        {"dataset": 2**62 + 1},
        {"dataset": iter([1])},
        {"dataset": []},
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": None},
        {"shuffle": "no"},
        {"drop_last": 1},
        {"rank": 0},
        {"world_size": 2},
        {"rank": 2, "world_size": 2},
        {"rank": -1, "world_size": 2},
        {"rank": 0, "world_size": 0},
        {"batch_size": 11, "drop_last": True},
    ],
)
def test_what_no_sampler_can_be_made_of_is_refused(wrong):
    with pytest.raises(InvalidInputError):
        ElasticSampler(**{"dataset": 10, "batch_size": 2, **wrong})


def test_processes_that_know_of_no_others_are_refused_instead_of_given_the_same(monkeypatch):
    sampler = ElasticSampler(10, batch_size=2)
    assert next(iter(sampler)) == order_of(10, epochs=1)[0][:2]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInputError, match="2 processes run"):
        iter(sampler)


def shares_in_group():
    sampler = ElasticSampler(Ids(11), batch_size=6)
    return list(sampler)


def test_rank_and_world_size_are_those_of_the_process_group(gang):
    order = order_of(11, epochs=1)[0]
    assert gang.values(2, shares_in_group) == [[order[0:3], order[6:8]], [order[3:6], order[8:11]]]


def test_nothing_of_the_global_generators_is_used():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  (the one that a program may rely on)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    sampler = ElasticSampler(100, batch_size=10, rank=0, world_size=1)
    for _ in sampler:
        sampler.advance()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
