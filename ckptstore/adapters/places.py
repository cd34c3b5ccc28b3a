"""Where a DataLoader is, said and found again without its help.

A DataLoader cannot say where it is, and what it reads ahead of the training has drawn random numbers already when the
training is saved. So its sampler is followed: which batches it gave out, which of them were trained on, and what the
random numbers were before each. After a resume the pass is begun anew with the numbers that it began with, the batches
that were trained on are left out and compared, those that had been read ahead are read again with the numbers that they
were read with, and only then the numbers of the save itself are set.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.format.checksum import hexdigest
from ckptstore.training import ElasticSampler, rng

SEEDS = ("initial_seed", "seed")
"""What samplers call the number that their order follows from."""
_MAX_DEPTH = 8
_NONE = object()
_PLACE = "_ckptstore_place"

_Draws = Mapping[str, Mapping[str, Any]]
"""States of random number generators, see `rng.capture`."""


@dataclass(frozen=True, slots=True)
class _GivenOut:
    """A batch that the loader reads or has read.

    Args:
        indices: Of its samples.
        draws: The random numbers before it was read; None where other processes read.
    """

    indices: Any
    draws: _Draws | None


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a pass is to go on.

    Args:
        batches: So many were trained on.
        order: Of these; None: it is not known.
        began: The random numbers with which the pass began.
        ahead: Those with which each batch after them was read, as far as that was; None where other processes read.
        is_drawn: Whether the sampler had come to its end.
    """

    batches: int
    order: str | None = None
    began: _Draws | None = None
    ahead: Sequence[_Draws | None] = ()
    is_drawn: bool = False


class LoaderPlace:
    """Where the DataLoader of this rank is; pass it as `loader=` to a TrainingState.

    It follows any loader with a dataset of known length and a sampler in this process, shuffled or not. What worker
    processes draw themselves is drawn anew after a resume; a loader without workers draws what it would have drawn.

    Args:
        generators: Random numbers that the dataset uses, by name, beside Python's, NumPy's and torch's own.
        leaves_out: Whether batches that were trained on are left out here; else whoever drives the loader does that.
    """

    def __init__(self, *, generators: Mapping[str, Any] | None = None, leaves_out: bool = True) -> None:
        self.generators: dict[str, Any] = dict(generators or {})
        """All that is drawn from to make batches, with the loader's own; a training state must hold them too."""
        self.samples = 0
        """How many samples this rank trained on, over all passes."""
        self._leaves_out = leaves_out
        self._sampler: Any = None
        self._workers_read, self._keeps_workers = 0, False
        self._passes = 0
        self._start: _Start | None = None
        self._then: Callable[[], object] | None = None
        self._batches, self._order = 0, ""
        self._began: _Draws | None = None
        self._is_drawn = False
        self._given_out: deque[_GivenOut] = deque()  # as many as the loader reads ahead, and no more

    @property
    def batches(self) -> int:
        """How many batches of the pass under way were trained on; 0 between two passes."""
        return self._start.batches if self._start is not None else self._batches

    @property
    def is_over(self) -> bool:
        """Whether all batches of the pass were trained on."""
        return self._batches == len(self._sampler)

    def facts(self) -> dict[str, Any]:
        """Return what must be the same when a run goes on: kinds of samplers, and how many batches a pass has."""
        return {"sampler": _kinds(self._sampler), "length": len(self._sampler)}

    def follow(self, loader: Any) -> None:
        """Look over the shoulder of a loader, from its next pass on.

        Args:
            loader: A DataLoader, or one that Accelerate has prepared.

        Raises:
            UnsupportedError: Nobody but itself can say where it is.
        """
        plain = getattr(loader, "base_dataloader", loader)
        _check_loader(plain)
        sampler = plain.batch_sampler if plain.batch_sampler is not None else plain.sampler
        _check_sampler(sampler)
        self._sampler, self._workers_read = sampler, plain.num_workers * (plain.prefetch_factor or 0)
        self._keeps_workers = plain.num_workers > 0 and plain.persistent_workers
        for depth, each in enumerate(_chain(sampler)):
            generator = getattr(each, "generator", None)
            if isinstance(generator, torch.Generator) and not _seeds_of(each):
                self.generators[f"sampler {depth}"] = generator
        if isinstance(plain.generator, torch.Generator):
            self.generators["loader"] = plain.generator
        _follow(sampler, self)
        self._end()

    def then(self, action: Callable[[], object]) -> None:
        """Call `action` once, when what had been read ahead has been read again, and before anything else is read."""
        self._then = action

    def leave_out(self, batches: int) -> None:
        """Take the first batches of the next pass as trained on already; somebody else resumed this run."""
        self._start = _Start(batches)

    def trained(self) -> list[Any]:
        """Count the oldest batch that was given out as trained on, and return the indices of its samples.

        Raises:
            InvalidInputError: No batch was given out that is not counted already.
        """
        if not self._given_out:
            raise InvalidInputError(
                "No batch of the followed loader is left to be counted as trained on.",
                hint="Count each batch once, and iterate over the loader that is followed.",
            )
        done = self._given_out.popleft()
        self._order = _chained(self._order, done.indices)
        self._batches += 1
        indices = _listed(done.indices)
        self.samples += len(indices)
        return indices

    def end(self) -> None:
        """End the pass, wherever it is: the next one begins at its beginning."""
        self._start = None
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is, for this rank."""
        sampler = self._sampler
        said = self.facts() | {
            "seeds": {f"{depth} {name}": seed for depth, name, seed in _all_seeds(sampler)},
            "samples": self.samples,
            "passes": self._passes,
        }
        start = self._start or _Start(0)
        if self._start is None and self._began is not None and not self.is_over:
            ahead = [each.draws for each in self._given_out]
            start = _Start(self._batches, self._order, self._began, ahead, self._is_drawn)
        return said | {**asdict(start), "ahead": list(start.ahead)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where another loader was.

        Raises:
            IncompatibleStateError: It is of a loader of another kind or length.
        """
        if not isinstance(state, Mapping) or state.keys() != self.state_dict().keys():
            raise IncompatibleStateError(
                "This is no place of a loader.", hint="Resume with the release of ckptstore that saved it."
            )
        now = self.facts()
        if unlike := [f"{name} was {state[name]} and is {now[name]}" for name in now if state[name] != now[name]]:
            raise IncompatibleStateError(
                f"The loader's place belongs to another loader: {', '.join(unlike)}.",
                hint="Make the loader as it was when the run was saved: dataset, batch size, sampler, ranks.",
                differences=unlike,
            )
        kinds = _chain(self._sampler)
        for name, seed in state["seeds"].items():
            depth, _, attribute = name.partition(" ")
            setattr(kinds[int(depth)], attribute, seed)
        self.end()
        self.samples, self._passes = state["samples"], state["passes"]
        # Workers that stay draw a number when they start: the run that went on did that before its first pass only.
        is_late_start = self._keeps_workers and self._passes > 0
        if state["began"] is not None or state["batches"] or is_late_start:
            self._start = _Start(**{each.name: state[each.name] for each in fields(_Start)})

    def given_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield what a sampler gives out, and note it. The sampler itself calls this."""
        start = self._begin_pass()
        read = start.batches + len(start.ahead)
        settled_at = self._settled_at(start)
        for index in itertools.count():
            if index == settled_at:
                self.settle()  # before the sampler draws for what comes next
            batch = next(batches, _NONE)
            if batch is _NONE:
                break
            if index < start.batches:
                self._pass_by(batch, start)
                if not self._leaves_out:
                    yield batch
                continue
            draws = start.ahead[index - start.batches] if index < read else None
            if draws is not None:
                rng.restore(draws, self.generators)
            self._given_out.append(_GivenOut(batch, None if self._workers_read else rng.capture(self.generators)))
            yield batch
        self._is_drawn = True
        if index < start.batches:
            raise _other_order(f"it had {start.batches} batches at least, and has {index}")
        self.settle()

    def settle(self) -> None:
        """Do what `then` was told, if it was not done."""
        action, self._then = self._then, None
        if action is not None:
            action()

    def _begin_pass(self) -> _Start:
        """Set the random numbers with which a sampler makes its order, and return where the pass goes on."""
        start, self._start = self._start, None
        self._end()
        if start is not None and start.began is not None:
            if self._then is None:
                raise InvalidInputError(
                    "Nobody says what the random numbers are when the loader is where it was.",
                    hint="Resume with the adapter's own call, not with the Checkpointer's.",
                )
            rng.restore(start.began, self.generators)
        elif start is None:
            self._then = None  # what the loader draws when it begins is what it drew
        elif not start.batches:
            self.settle()
        self._passes += start is None or start.began is None
        self._began = rng.capture(self.generators)
        return start or _Start(0)

    def _settled_at(self, start: _Start) -> int | None:
        """Return before which batch the numbers of the save are set: the one that comes after all that was read then.

        None: at the end. If workers read then and do not now, or others do, it is before the training sees a batch.
        """
        was_in_process = all(draws is not None for draws in start.ahead)
        most = self._workers_read or (len(start.ahead) if was_in_process else 0)
        if len(start.ahead) <= most and start.is_drawn:
            return None
        return start.batches + min(len(start.ahead), most)

    def _pass_by(self, batch: Any, start: _Start) -> None:
        """Leave out a batch that was trained on before; after the last of them, see whether they were the same."""
        self._order = _chained(self._order, batch)
        self._batches += 1
        if self._batches == start.batches and start.order not in (None, self._order):
            raise _other_order(f"the first {start.batches} batches have other samples")

    def _end(self) -> None:
        self._batches, self._order, self._began, self._is_drawn = 0, "", None, False
        self._given_out.clear()


def _follow(sampler: Any, place: LoaderPlace) -> None:
    """Let a sampler tell a place what it gives out. For everybody else it stays what it is, of a class like its own."""
    kind = type(sampler)
    if not hasattr(kind, _PLACE):

        def iterate(self: Any) -> Iterator[Any]:
            return cast("LoaderPlace", getattr(self, _PLACE)).given_out(kind.__iter__(self))

        names = {
            **{name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")},
            "__iter__": iterate,
            _PLACE: None,
        }
        try:
            sampler.__class__ = type(kind.__name__, (kind,), names)
        except TypeError as error:
            raise UnsupportedError(
                f"A loader's sampler is a {kind.__name__}, which cannot be followed.",
                hint="Use a class of your own with __iter__ and __len__, or torch's BatchSampler.",
            ) from error
    setattr(sampler, _PLACE, place)


def _check_loader(loader: Any) -> None:
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise UnsupportedError(
            f"A {name} is no torch DataLoader: nobody but itself can say where it is.",
            hint="Train on a DataLoader, or write the loop yourself with ckptstore.training and PerRank(loader).",
        )
    if callable(getattr(loader, "state_dict", None)):
        raise UnsupportedError(
            f"A {name} says itself where it is, and this would count beside it.",
            hint="Train on a plain DataLoader, or write the loop yourself with ckptstore.training and PerRank(loader).",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            f"The dataset {type(loader.dataset).__name__} is a stream: it has no order that could be found again.",
            hint="Use a dataset with __len__ and __getitem__, or write the loop yourself with ckptstore.training and "
            "PerRank(StatefulDataLoader(...)).",
        )


def _check_sampler(sampler: Any) -> None:
    if isinstance(sampler, ElasticSampler):
        raise UnsupportedError(
            "An ElasticSampler counts what was trained on itself.",
            hint="Use DataLoader(shuffle=True) here, or write the loop yourself with ckptstore.training.",
        )
    try:
        len(sampler)
    except TypeError as error:
        raise UnsupportedError(
            f"The sampler {type(sampler).__name__} does not know how many batches it has.", hint="Give it __len__."
        ) from error


def _chain(sampler: Any) -> list[Any]:
    """Return a sampler, and those that it takes its indices from."""
    found: list[Any] = []
    while sampler is not None and len(found) < _MAX_DEPTH:
        found.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = inner if inner is not None else getattr(sampler, "sampler", None)
    return found


def _kinds(sampler: Any) -> str:
    return " of ".join(type(each).__qualname__ for each in _chain(sampler))


def _seeds_of(sampler: Any) -> list[tuple[str, int]]:
    found = [(name, getattr(sampler, name, None)) for name in SEEDS]
    return [(name, seed) for name, seed in found if isinstance(seed, int) and not isinstance(seed, bool)]


def _all_seeds(sampler: Any) -> list[tuple[int, str, int]]:
    return [(depth, *each) for depth, one in enumerate(_chain(sampler)) for each in _seeds_of(one)]


def _chained(order: str, indices: Any) -> str:
    """Return what tells the order of batches apart, one batch further."""
    return hexdigest(f"{order} {_listed(indices)}".encode())


def _listed(indices: Any) -> list[Any]:
    many = isinstance(indices, Sequence) and not isinstance(indices, str)
    return [int(each) if hasattr(each, "__index__") else each for each in (indices if many else [indices])]


def _other_order(how: str) -> IncompatibleStateError:
    return IncompatibleStateError(
        f"The loader gives out other batches than when the run was saved: {how}.",
        hint="Make dataset, sampler and loader as they were, or resume from a checkpoint at an epoch's end.",
    )
