"""What each rank has for itself comes back to it, and what all hold is stored once; on other ranks a hook decides."""

import collections
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from states import same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptstore import CheckpointStore, DisagreementError, IncompatibleStateError
from ckptstore.training import Checkpointer, PerRank, TrainingState


class Cursor:
    """Where a rank is in its own share of the data."""

    def __init__(self, place=None):
        self.place = place

    def state_dict(self):
        return self.place

    def load_state_dict(self, place):
        self.place = place


def merged(states, rank, world_size):
    """Return a rank's part of what all ranks had left to read."""
    return {"parts": [state["cursor"] for state in states[rank::world_size]], "of": len(states)}


class Job:
    """A rank's training: weights that all have, a sharded tensor, and a cursor and random numbers of its own."""

    def __init__(self, seed, *, merge=None, place=None, **options):
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(100 * seed + self.rank)
        self.generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.model = torch.nn.Linear(4, 4)
        torch.nn.init.constant_(self.model.weight, seed)
        mesh = init_device_mesh("cpu", (ranks,))
        self.average = Cursor({"m": distribute_tensor(seed * torch.arange(14.0).view(7, 2), mesh, [Shard(0)])})
        self.cursor = Cursor(place)
        self.state = TrainingState(
            model=self.model,
            ema=self.average,
            loader={"train": PerRank(self.cursor, merge=merge)},
            generators={"own": self.generator},
            **options,
        )

    def draws(self):
        """Return five numbers of each generator."""
        return [
            [random.random() for _ in range(5)],  # noqa: S311  (no secret)
            np.random.rand(5).tolist(),  # noqa: NPY002
            torch.rand(5).tolist(),
            torch.rand(5, generator=self.generator).tolist(),
        ]


def save(url):
    """Save, and return what this rank's cursor is and what it would draw."""
    job = Job(1, place={"cursor": 100 + dist.get_rank(), "buffer": torch.tensor([dist.get_rank()])})
    with Checkpointer(url, job.state) as checkpointer:
        checkpointer.save()
    return job.cursor.place, job.draws()


def resume(url, merge):
    """Resume; return the cursor, what is drawn, whether what is everybody's is right, and what the report says."""
    job = Job(2, merge=merge, place="none yet")
    with Checkpointer(url, job.state) as checkpointer:
        report = checkpointer.resume()
    found = job.average.place["m"]
    assert isinstance(found, DTensor)
    right = torch.equal(found.full_tensor(), torch.arange(14.0).view(7, 2)) and bool((job.model.weight == 1).all())
    return job.cursor.place, job.draws(), right, report.random


def merging(url):
    return resume(url, merged)


def refused(url):
    job = Job(2, place="none yet")
    with Checkpointer(url, job.state) as checkpointer, pytest.raises(IncompatibleStateError) as caught:
        checkpointer.resume()
    assert (job.cursor.place, bool((job.model.weight == 2).all())) == ("none yet", True)
    return str(caught.value)


@pytest.fixture(scope="module")
def of_four(gang, tmp_path_factory):
    """Return the root of a run that four ranks saved, and what each had."""
    url = str(tmp_path_factory.mktemp("four") / "run")
    return url, gang.values(4, save, url)


def shards_in(url):
    return sorted(Path(url).rglob("*.safetensors"))


def names_in(path):
    with safe_open(path, "pt") as shard:
        return list(shard.keys())


def same_as_before(url):
    return resume(url, None)


def test_each_rank_gets_its_own_back_and_goes_on_drawing_its_own_numbers(gang, of_four):
    url, saved = of_four
    found = gang.values(4, same_as_before, url)
    for rank, (place, draws, right, random_numbers) in enumerate(found):
        assert same(place, {"cursor": 100 + rank, "buffer": torch.tensor([rank])})
        assert draws == saved[rank][1]
        assert right
        assert random_numbers == ("restored: python, numpy, torch, named:own",)
    assert len({str(draws) for _, draws, *_ in found}) == 4


def test_what_all_ranks_hold_is_stored_once_and_what_is_a_ranks_own_for_each(of_four):
    keys = CheckpointStore.open(of_four[0]).latest().keys
    own = collections.Counter(key.partition("/")[2].partition("/")[2] for key in keys if key.startswith("ranks/"))
    assert own == {"loader.train": 4, "rng": 4, "standing": 4}
    others = {key for key in keys if not key.startswith("ranks/")}
    assert others == {
        *("model.weight", "model.bias", "ema.m"),
        *("values/model", "values/ema", "values/progress"),
    }
    inside = collections.Counter(name.partition("@")[0] for path in shards_in(of_four[0]) for name in names_in(path))
    assert inside == {"__ckptstore_leaves__": 4, "ema.m": 4} | dict.fromkeys(keys.keys() - {"ema.m"}, 1)


@pytest.mark.parametrize("now", [2, 3, 8, 1])
def test_another_number_of_ranks_is_refused_with_both_before_anything_is_changed(gang, of_four, now):
    for message in gang.values(now, refused, of_four[0]):
        assert "4 ranks" in message
        assert f"resumed on {now} rank" in message
        assert "pass PerRank(..., merge=function)" in message


@pytest.mark.parametrize("now", [2, 3, 8, 1])
def test_a_hook_gets_the_cursors_of_all_ranks_and_weights_are_laid_out_anew(gang, of_four, now):
    url, saved = of_four
    found = gang.values(now, merging, url)
    for rank, (place, draws, right, random_numbers) in enumerate(found):
        assert place == {"parts": [100 + each for each in range(4)][rank::now], "of": 4}
        assert right
        if rank < 4:
            assert draws == saved[rank][1]
        else:
            names = ("python", "numpy", "torch", "named:own")
            assert random_numbers == tuple(f"{name}: seeded, because no state of it was saved" for name in names)
    assert len({str(draws) for _, draws, *_ in found}) == now


def extras_that_differ(url):
    job = Job(1, extras={"cursor": 100 + dist.get_rank(), "w": 1})
    with Checkpointer(url, job.state) as checkpointer, pytest.raises(DisagreementError) as caught:
        checkpointer.save()
    return str(caught.value)


def test_what_should_be_everybodys_and_differs_is_refused_before_anything_is_committed(gang, tmp_path):
    url = str(tmp_path / "run")
    one, other = gang.values(2, extras_that_differ, url)
    assert one == other
    assert "Rank 1 holds another extras than rank 0" in one
    assert "pass what is each rank's own as loader= or PerRank" in one
    assert list(itertools.islice(tmp_path.rglob("*.safetensors"), 1)) == []
