"""Loaders and streams as parts of a training state: who says where the data is, and what other ranks do with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, default_collate

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.options import check_counts
from ckptstore.training.sampler import ElasticSampler
from ckptstore.units import counted

Merge = Callable[[Sequence[Any], int, int], Any]
"""Makes a state for this rank from those of all saved ranks: `merge(states, rank, world_size)`."""


@runtime_checkable
class Stateful(Protocol):
    """Something that says where it is, and can be brought there again."""

    def state_dict(self) -> Any:
        """Return where it is."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Go there."""
        ...


class PerRank:
    """A loader or a stream whose place each rank has for itself: torchdata's StatefulDataLoader, anything with a state.

    Each rank's state is saved under its own key. Where it is, is what the object itself says and is handed through as
    it is: it must tell of what was trained on, and that what workers hold in advance does not count is its promise.
    A StatefulDataLoader keeps it. A stream with a state behind a plain DataLoader with workers does not, since the
    workers move on copies of it.

    On the same number of ranks each gets its own state back. On another number `merge` makes one from all of them, on
    every rank; without it the resume is refused.

    Args:
        stateful: It has `state_dict()` and `load_state_dict(state)`.
        merge: `merge(states, rank, world_size)` returns the state that rank `rank` of now `world_size` loads, from
            those of all saved ranks, in their order. Together they must cover what no rank has trained on, once.

    Raises:
        InvalidInputError: It has no state, so it cannot say where it is; or it has an ElasticSampler, which does.
    """

    def __init__(self, stateful: Stateful, *, merge: Merge | None = None) -> None:
        if _sampler_of(stateful) is not None:
            raise InvalidInputError(
                "Its ElasticSampler says where this loader is, on any number of ranks; both would count.",
                hint="Hand over the sampler in place of PerRank(loader).",
            )
        if not _is_stateful(stateful):
            raise _refusal(stateful)
        if merge is not None and not callable(merge):
            raise InvalidInputError(
                f"merge must be a function, not {merge!r:.80}.",
                hint="Pass merge=function, called as merge(states, rank, world_size).",
                option="merge",
            )
        self.stateful, self.merge = stateful, merge

    def state_dict(self) -> Any:
        """Return this rank's state."""
        return self.stateful.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Bring this rank's object to `state`, and ask it where it is.

        Asked, a StatefulDataLoader begins the iteration that was under way, and draws a random number for it: now, and
        not when the loop begins, where the unbroken run drew none.
        """
        self.stateful.load_state_dict(state)
        self.stateful.state_dict()

    def describe(self) -> str:
        """Return for people who counts, and what becomes of it on another number of ranks."""
        elsewhere = "merged by a hook" if self.merge else "refused"
        return f"{type(self.stateful).__name__}: each rank's own count; on another number of ranks {elsewhere}"


def source_of(given: object, *, name: str) -> ElasticSampler | PerRank:
    """Return what says where the loader `given` is: its ElasticSampler, or itself for each rank.

    Args:
        given: A sampler, a loader of any kind, a stream, or `PerRank` of one.
        name: What the training state calls it, for messages.

    Raises:
        InvalidInputError: Nothing of it can say where it is, as in a plain DataLoader.
    """
    if isinstance(given, ElasticSampler | PerRank):
        return given
    sampler = _sampler_of(given)
    if sampler is not None:
        return sampler
    if isinstance(given, Stateful) and _is_stateful(given):
        return PerRank(given)
    raise _refusal(given, name=name)


def check_world_size(per_rank: PerRank, *, saved: int, now: int, name: str) -> None:
    """Check, before anything is read, that states of `saved` ranks can be loaded on `now` ranks.

    Raises:
        IncompatibleStateError: The numbers differ, and no merge hook was given.
    """
    check_counts(saved=saved, now=now)
    if saved != now and per_rank.merge is None:
        raise IncompatibleStateError(
            f"{name} has a state for each of {counted(saved, 'rank')}, and is resumed on {counted(now, 'rank')}.",
            hint=f"Resume on {counted(saved, 'rank')}, pass PerRank(..., merge=function), or use ElasticSampler, which "
            "goes on on any number.",
            name=name,
            saved_world_size=saved,
            world_size=now,
        )


def choose(saved_states: Sequence[Any], per_rank: PerRank, *, rank: int, world_size: int, name: str = "loader") -> Any:
    """Return the state that `rank` loads. Nothing is changed.

    Args:
        saved_states: Those of all ranks that saved, in their order.
        per_rank: What will load it.
        rank: Of this process now.
        world_size: How many ranks there are now.
        name: What the training state calls it, for messages.

    Raises:
        IncompatibleStateError: Another number of ranks saved, and no merge hook was given.
        InvalidInputError: The rank cannot be, or the hook returned no state. What the hook raises comes as it is.
    """
    check_world_size(per_rank, saved=len(saved_states), now=world_size, name=name)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
        raise InvalidInputError(f"{rank!r:.80} is no rank of {world_size}.", hint="Pass this process's rank.")
    if per_rank.merge is None or len(saved_states) == world_size:
        return saved_states[rank]
    merged = per_rank.merge(tuple(saved_states), rank, world_size)
    if merged is None:
        raise InvalidInputError(
            f"The merge hook of {name} returned None for rank {rank} of {world_size}.",
            hint="Return the state that this rank's load_state_dict takes.",
            name=name,
        )
    return merged


@dataclass(frozen=True)
class Collate:
    """Makes a batch of samples, also of none: a rank whose share is empty trains on tensors with 0 rows.

    `default_collate` fails on an empty list. Here the batch of the one sample `example` is made, and its rows are left
    out: shapes, dtypes and structure are those of every other batch.

    Args:
        example: A sample, as the dataset gives it: `dataset[0]`.
        collate: Makes a batch of a list of samples; its tensors have the samples along their first dimension. A tensor
            without dimensions stays as `example` makes it.

    Raises:
        UnsupportedError: The batch of `example` has something whose rows cannot be left out.
    """

    example: Any
    collate: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        self([])  # what it cannot do is said now, not at an epoch's end

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of `samples`."""
        return self.collate(samples) if samples else _without_rows(self.collate([self.example]))


def _without_rows(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: _without_rows(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_without_rows, batch))
    if isinstance(batch, list | tuple):
        columns = all(isinstance(each, torch.Tensor | Mapping | list | tuple) for each in batch)
        return type(batch)(map(_without_rows, batch)) if columns else type(batch)()  # texts, say: one for a sample
    raise UnsupportedError(
        f"A batch has a {type(batch).__name__}, of which no empty one can be made.",
        hint="Let `collate` return tensors in dicts, lists and tuples, or write a collate function that takes [].",
    )


def _like(batch: Any, entries: dict[Any, Any]) -> Any:
    return entries if type(batch) is dict else type(batch)(entries)


def _sampler_of(loader: object) -> ElasticSampler | None:
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, ElasticSampler) else None


def _is_stateful(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _refusal(given: object, *, name: str = "This") -> InvalidInputError:
    if isinstance(given, DataLoader):
        what, hint = "a DataLoader that cannot say where it is", "Use DataLoader(batch_sampler=ElasticSampler(...))"
    else:
        what, hint = f"a {type(given).__name__} without state_dict and load_state_dict", "Hand over an ElasticSampler"
    return InvalidInputError(
        f"{name} is {what}: after a resume it would begin again.",
        hint=f"{hint}, or PerRank(torchdata.stateful_dataloader.StatefulDataLoader(...)).",
        kind=type(given).__name__,
    )
