"""Where a DataLoader is: followed without its help, and found again by another one."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from trainings import seed_all

from ckptstore.adapters.places import LoaderPlace
from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.training import ElasticSampler, rng

SAMPLES = 11  # 4 batches of 3, the last of 2


class Noisy(Dataset):
    """Samples that the process's own random numbers, and named ones, have a part in."""

    def __init__(self, generator=None):
        self.generator = generator

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return float(index), torch.rand(()), torch.rand((), generator=self.generator)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(SAMPLES)


def loader_of(**given):
    given = {"dataset": Noisy(), "batch_size": 3, "shuffle": True, **given}
    return DataLoader(given.pop("dataset"), **given)


def trained(loader, place, *, steps, ahead=0):
    """Train for some batches, reading so many ahead of them; each step draws a number, too."""
    found, queue, iterator = [], [], iter(loader)
    while len(found) < steps:
        while len(queue) <= ahead and (batch := next(iterator, None)) is not None:
            queue.append(batch)
        if not queue:
            place.end()
            iterator = iter(loader)
            continue
        found.append(([each.tolist() for each in queue.pop(0)], torch.rand(()).item()))
        place.trained()
    return found


def resumed(loader, place, state, draws, **given):
    """Go on as an adapter does: the numbers of the save are set once what had been read ahead is read again."""
    place.load_state_dict(state)
    rng.restore(draws, place.generators)
    place.then(lambda: rng.restore(draws, place.generators))
    return trained(loader, place, **given)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5, 7])
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "in order"])
def test_another_process_reads_what_would_have_been_read_next(kind, steps, ahead):
    def made(seed):
        seed_all(seed)
        noise = torch.Generator().manual_seed(seed)
        own = {"generator": torch.Generator().manual_seed(seed)} if kind == "own generator" else {}
        loader = loader_of(dataset=Noisy(noise), shuffle=kind != "in order", **own)
        place = LoaderPlace(generators={"noise": noise})
        place.follow(loader)
        return loader, place

    control, place = made(1)
    before = trained(control, place, steps=steps, ahead=ahead)
    state, draws = place.state_dict(), rng.capture(place.generators)
    control, place = made(1)
    whole = trained(control, place, steps=9, ahead=ahead)
    assert whole[:steps] == before

    other, place = made(99)
    assert resumed(other, place, state, draws, steps=9 - steps, ahead=ahead) == whole[steps:]


def test_without_the_numbers_of_what_was_read_ahead_it_would_read_otherwise():
    seed_all(1)
    loader, place = loader_of(), LoaderPlace()
    place.follow(loader)
    trained(loader, place, steps=2, ahead=1)
    state, draws = place.state_dict(), rng.capture()
    seed_all(1)
    loader, place = loader_of(), LoaderPlace()
    place.follow(loader)
    whole = trained(loader, place, steps=4, ahead=1)
    other, place = loader_of(), LoaderPlace()
    place.follow(other)
    assert resumed(other, place, {**state, "ahead": []}, draws, steps=2, ahead=1) != whole[2:]


def test_the_seed_that_an_order_follows_from_is_found_again():
    def made(seed):
        sampler = DistributedSampler(Noisy(), num_replicas=2, rank=1, seed=seed)
        loader, place = loader_of(sampler=sampler, shuffle=False), LoaderPlace()
        place.follow(loader)
        return loader, place

    loader, place = made(7)
    expected = [batch[0] for batch, _ in trained(loader, place, steps=2)]
    _, place = made(7)
    state = place.state_dict()  # of a pass that has not begun
    other, place = made(8)
    found = [batch[0] for batch, _ in resumed(other, place, state, rng.capture(), steps=2)]
    assert found == expected


def test_other_samples_than_those_that_were_trained_on_are_refused():
    loader, place = loader_of(shuffle=False), LoaderPlace()
    place.follow(loader)
    trained(loader, place, steps=2)
    state = place.state_dict()

    class Backwards(list):
        def __iter__(self):
            yield from reversed(range(SAMPLES))

    backwards = BatchSampler(Backwards(range(SAMPLES)), 3, drop_last=False)
    assert [len(batch) for batch in backwards] == [3, 3, 3, 2]
    Backwards.__qualname__ = "SequentialSampler"  # it looks the same
    other, place = loader_of(batch_sampler=backwards, batch_size=1, shuffle=None), LoaderPlace()
    place.follow(other)
    with pytest.raises(IncompatibleStateError, match="first 2 batches have other samples"):
        resumed(other, place, state, rng.capture(), steps=1)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"batch_size": 4}, "length was 4 and is 3"), ({"shuffle": False}, "SequentialSampler")],
    ids=["batch size", "order"],
)
def test_a_place_in_another_loader_is_refused_by_name(given, named):
    place, other = LoaderPlace(), LoaderPlace()
    place.follow(loader_of())
    other.follow(loader_of(**given))
    with pytest.raises(IncompatibleStateError, match=named):
        other.load_state_dict(place.state_dict())
    with pytest.raises(IncompatibleStateError, match="no place"):
        other.load_state_dict({})


def test_a_sampler_that_is_followed_stays_what_it_is():
    loader, place = loader_of(), LoaderPlace()
    before = type(loader.batch_sampler)
    place.follow(loader)
    sampler = loader.batch_sampler
    assert isinstance(sampler, BatchSampler)
    assert (type(sampler).__name__, type(sampler).__module__) == (before.__name__, before.__module__)
    assert (len(sampler), sampler.batch_size, type(sampler.sampler)) == (4, 3, RandomSampler)
    another = BatchSampler(range(2), 1, drop_last=False)
    assert type(another) is before
    assert list(another) == [[0], [1]]


def test_a_batch_is_counted_once_and_only_if_it_was_given_out():
    loader, place = loader_of(), LoaderPlace()
    place.follow(loader)
    with pytest.raises(InvalidInputError, match="No batch"):
        place.trained()
    next(iter(loader))
    assert len(place.trained()) == place.samples == 3
    with pytest.raises(InvalidInputError, match="No batch"):
        place.trained()
    assert (place.batches, place.is_over) == (1, False)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata asks torch for it
@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (lambda: DataLoader(Stream()), "Stream is a stream"),
        (lambda: StatefulDataLoader(Noisy()), "says itself where it is"),
        (lambda: DataLoader(Noisy(), batch_sampler=ElasticSampler(SAMPLES, batch_size=3)), "ElasticSampler"),
        (lambda: DataLoader(Noisy(), batch_sampler=[[0], [1]]), "list, which cannot be followed"),
        (lambda: DataLoader(Noisy(), batch_sampler=iter([[0], [1]])), "does not know how many"),
        (lambda: [1, 2], "list is no torch DataLoader"),
    ],
    ids=["a stream", "a stateful loader", "an elastic sampler", "a list", "an iterator", "no loader"],
)
def test_loaders_that_only_they_themselves_can_place_are_refused_by_name(loader, named):
    with pytest.raises(UnsupportedError, match=named):
        LoaderPlace().follow(loader())


def test_the_package_imports_none_of_the_libraries():
    program = (
        "import ckptstore.adapters, sys; print({'torch', 'transformers', 'accelerate', 'lightning'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"


@pytest.mark.parametrize("extra", ["huggingface", "accelerate", "lightning"])
def test_a_library_that_is_not_installed_is_named_with_what_to_install(monkeypatch, extra):
    for name in ("transformers", "accelerate", "lightning"):
        monkeypatch.setitem(sys.modules, name, None)
        for loaded in [each for each in sys.modules if each.startswith(f"{name}.")]:
            monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.delitem(sys.modules, f"ckptstore.adapters.{extra}", raising=False)
    with pytest.raises(UnsupportedError, match="cannot import its library") as raised:
        __import__(f"ckptstore.adapters.{extra}")
    assert f"ckptstore[{extra}]" in raised.value.hint
