"""Which samples a rank trains on: one order for all ranks, and a cursor that counts what was trained on.

```python
sampler = ElasticSampler(dataset, batch_size=60, seed=7)
loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, collate_fn=Collate(dataset[0]))
while progress.epoch < epochs:
    for inputs, labels in loader:                      # goes on at the cursor
        total = cross_entropy(model(inputs), labels, reduction="sum")
        loss = total * world_size / sampler.batch_samples   # the mean over ranks is the mean over samples
        ...
        optimizer.step()
        sampler.advance(progress=progress)             # now they count
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from ckptstore.errors import IncompatibleStateError, InvalidInputError
from ckptstore.options import check_counts, check_flags
from ckptstore.training import order
from ckptstore.training.progress import LARGEST, Progress
from storage_writers import environment

BLOCK_SAMPLES = 8192
"""How many samples of a rank are looked up at once, about: enough for NumPy, and little to hold."""

_FIXED = ("length", "seed", "shuffle", "order")


class BeforeFirst:
    """What is done before a training begins, for all of its samplers together: once, or not at all.

    Args:
        action: What is done.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Callable[[], object] | None = action

    def __call__(self) -> None:
        """Do it, if the training has not begun."""
        action, self._action = self._action, None
        if action is not None:
            action()

    def cancel(self) -> None:
        """Do it no more: the training has begun."""
        self._action = None


class ElasticSampler(Sampler[list[int]]):
    """Batches of sample numbers, for `DataLoader(batch_sampler=...)`, which any number of ranks share.

    The order of an epoch is a function of (length, seed, epoch) only, see `ckptstore.training.order`. The cursor is the
    number of its samples that were trained on: `advance` moves it, and nothing else does, so what workers have fetched
    beforehand never counts. A batch is the next `batch_size` samples from the cursor, over all ranks; rank r of W gets
    those from r * n // W to before (r + 1) * n // W of its n. Hence any world size and any batch size go on exactly
    where another one stopped.

    The last batch of an epoch has what is left. Shares are then unequal and may be empty: an empty list is given all
    the same, so that every rank joins; `Collate` makes a batch of it. Weight gradients by samples (`batch_samples`).

    Args:
        dataset: The dataset, or its number of samples.
        batch_size: Samples in a batch, over all ranks.
        rank: Of this process among those that share batches: its data-parallel rank. By default its rank in
            torch.distributed, asked for when an iteration begins; so is `world_size`.
        world_size: How many share batches.
        seed: Of the order, from 0 to below 2**64; the same on every rank.
        shuffle: False: samples come by number.
        drop_last: An epoch ends before a batch that it cannot fill.

    Raises:
        InvalidInputError: An argument is outside of what is allowed, or the dataset has no length.
    """

    def __init__(  # noqa: PLR0913  (a face takes written-out keywords)
        self,
        dataset: int | Sized,
        *,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        check_counts(batch_size=batch_size)
        check_flags(shuffle=shuffle, drop_last=drop_last)
        self._length = _length_of(dataset)
        self._seed = _check_whole("seed", seed, below=2**64)
        self._place = _place_of(rank, world_size)
        self._batch_size, self._shuffle, self._drop_last = batch_size, shuffle, drop_last
        if drop_last and self._length < batch_size:
            raise InvalidInputError(
                f"An epoch of {self._length} samples has no full batch of {batch_size}, and drop_last leaves the rest.",
                hint="Lower batch_size, or pass drop_last=False.",
                length=self._length,
                batch_size=batch_size,
            )
        self._epoch, self._cursor = 0, 0
        self._given: int | None = None  # up to where this epoch was given out; None: nobody has asked
        self._loads = 0
        self._before_first: BeforeFirst | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the cursor is in, from 0 on."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch were trained on, over all ranks."""
        return self._cursor

    @property
    def batch_size(self) -> int:
        """How many samples a full batch has, over all ranks."""
        return self._batch_size

    @property
    def batch_samples(self) -> int:
        """How many samples the batch at the cursor has, over all ranks: the one that is trained on now."""
        return min(self._batch_size, self._length - self._cursor)

    def __len__(self) -> int:
        """Return how many batches are left in this epoch."""
        left = self._length - self._cursor
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Return this rank's shares of the batches from the cursor to the end of the epoch.

        Raises:
            InvalidInputError: A launcher has started several processes and torch.distributed does not know of them: all
                would get the same samples. Later: the sampler went on to another epoch, or was restored, and this
                iteration did not.
        """
        place = self._place or _place_in_group()
        if self._given is None:
            self._given = self._cursor
        return self._shares(*place)

    def advance(self, samples: int | None = None, *, progress: Progress | None = None) -> int:
        """Count the batch at the cursor as trained on, at an epoch's end begin the next one, and return its samples.

        Every rank calls it once for a batch, an empty share included, when the batch is in the weights or in the
        accumulated gradients.

        Args:
            samples: How many were trained on, over all ranks, where that is known: one whole batch, or several.
            progress: Counts them in `consumed_samples`, and follows `epoch`.

        Raises:
            InvalidInputError: They are not whole batches of this epoch, or more than were given out here.
        """
        samples = self._checked(samples)
        self.begin()
        if progress is not None:
            progress.consumed_samples += samples
        self._cursor += samples
        self._settle()
        if progress is not None:
            progress.epoch = self._epoch
        return samples

    def before_first(self, action: BeforeFirst) -> None:
        """Do `action` when the next iteration gives out its first share, if that is in the middle of an epoch.

        A DataLoader draws a random number when it begins, and asks for the first share after that. So what is restored
        there goes on as if the loader had never stopped.

        Args:
            action: All samplers of a training share it. The first share of any of them, or the first batch that was
                trained on, is the training's beginning: after that it is done no more.
        """
        self._before_first = action

    def begin(self) -> None:
        """Say that the training has begun: what `before_first` was given is done no more, by any of its samplers."""
        if self._before_first is not None:
            self._before_first.cancel()
            self._before_first = None

    @property
    def order(self) -> dict[str, Any]:
        """What its orders are a function of, beside the epoch: the same when a run goes on."""
        return {"length": self._length, "seed": self._seed, "shuffle": self._shuffle, "order": order.NAME}

    def state_dict(self) -> dict[str, Any]:
        """Return where the sampler is, and of which order. It is the same on every rank."""
        return {**self.order, "epoch": self._epoch, "cursor": self._cursor}

    def begin_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Iterations begun before are over.

        Raises:
            InvalidInputError: There is no such epoch.
        """
        self._epoch, self._cursor, self._given = _check_whole("epoch", epoch, below=LARGEST), 0, None
        self._loads += 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler was, of whatever batch size and world size. Iterations begun before are over.

        With drop_last, a rest that cannot fill a batch of this sampler is left, and the next epoch begins.

        Raises:
            IncompatibleStateError: It is of another length, seed, shuffle or order, or is no state of a sampler.
            InvalidInputError: Its epoch or cursor cannot be.
        """
        expected = {*_FIXED, "epoch", "cursor"}
        if not isinstance(state, Mapping) or state.keys() != expected:
            has = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise IncompatibleStateError(
                f"This is no state of an ElasticSampler: it has {has}, not {sorted(expected)}.",
                hint="Resume with the sampler that was saved; `ckptstore show URL NAME --keys` shows what was.",
            )
        _refuse_other_order(state, self.order)
        epoch = _check_whole("epoch", state["epoch"], below=LARGEST)
        cursor = _check_whole("cursor", state["cursor"], below=self._length)
        self._epoch, self._cursor, self._given = epoch, cursor, None
        self._loads += 1
        self._settle()

    def _shares(self, rank: int, world_size: int) -> Iterator[list[int]]:
        if self._before_first is not None and self._cursor:
            self._before_first()
        self.begin()
        begun, batches, start = (self._epoch, self._loads), len(self), self._cursor
        share = -(-self._batch_size // world_size)
        at_once = max(1, BLOCK_SAMPLES // share)
        shuffled = order.EpochOrder(length=self._length, seed=self._seed, epoch=self._epoch) if self._shuffle else None
        for first in range(0, batches, at_once):
            places, ends = [], []
            for batch in range(first, min(first + at_once, batches)):
                low = start + batch * self._batch_size
                count = min(self._batch_size, self._length - low)
                places.append(
                    np.arange(low + rank * count // world_size, low + (rank + 1) * count // world_size, dtype=np.int64)
                )
                ends.append(low + count)
            flat = np.concatenate(places)
            samples = np.split(shuffled.of(flat) if shuffled else flat, np.cumsum([len(each) for each in places])[:-1])
            for mine, end in zip(samples, ends, strict=True):
                self._give_out(begun, end)
                yield mine.tolist()

    def _give_out(self, begun: tuple[int, int], end: int) -> None:
        if begun != (self._epoch, self._loads):
            raise InvalidInputError(
                f"This iteration began in epoch {begun[0]}, and the sampler was restored or is in epoch {self._epoch}.",
                hint="Call iter(loader) again, after the resume and for every epoch.",
                began_in=begun[0],
                epoch=self._epoch,
            )
        self._given = max(self._given or 0, end)

    def _checked(self, samples: int | None) -> int:
        left = self._length - self._cursor
        whole = min(self._batch_size, left) if samples is None else samples
        if isinstance(whole, bool) or not isinstance(whole, int) or not 0 < whole <= left:
            raise InvalidInputError(
                f"{whole!r:.80} samples cannot have been trained on: {left} are left in epoch {self._epoch}.",
                hint="Call advance once for each batch, with how many samples it had on all ranks together.",
                left=left,
            )
        if whole % self._batch_size and (whole != left or self._drop_last):
            raise InvalidInputError(
                f"{whole} samples are not whole batches of {self._batch_size}, of which {left} samples are left.",
                hint="Sum the samples up over all ranks, or leave the number out.",
                left=left,
                batch_size=self._batch_size,
            )
        if self._given is not None and self._cursor + whole > self._given:
            raise InvalidInputError(
                f"{self._cursor + whole} samples of epoch {self._epoch} would be trained on, and {self._given} were "
                "given out.",
                hint="Call advance once for each batch.",
                given=self._given,
            )
        return whole

    def _settle(self) -> None:
        left = self._length - self._cursor
        if left == 0 or (self._drop_last and left < self._batch_size):
            self._epoch, self._cursor, self._given = self._epoch + 1, 0, None


def begin_all(samplers: Iterable[object]) -> None:
    """Let none of these restore random numbers any more: the training goes on."""
    for each in samplers:
        if isinstance(each, ElasticSampler):
            each.begin()


def _refuse_other_order(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differences = {name: [saved[name], now[name]] for name in _FIXED if not _same(saved[name], now[name])}
    if differences:
        said = ", ".join(f"{name} was {old!r:.80} and is {new!r}" for name, (old, new) in differences.items())
        raise IncompatibleStateError(
            f"The sampler's state belongs to another order of samples: {said}.",
            hint="Give ElasticSampler what was saved; for other data, resume without the sampler's state.",
            differences=differences,
        )


def _same(saved: object, now: object) -> bool:
    return type(saved) is type(now) and saved == now  # 1 is not True


def _length_of(dataset: int | Sized) -> int:
    if not isinstance(dataset, int):
        if not isinstance(dataset, Sized):
            raise InvalidInputError(
                f"A dataset of type {type(dataset).__name__} has no length, so it has no order.",
                hint="For a stream, save where it is itself: PerRank(stream), or torchdata's StatefulDataLoader.",
            )
        dataset = len(dataset)
    check_counts(length=dataset)
    return _check_whole("length", dataset, below=order.MAX_LENGTH + 1)


def _check_whole(name: str, value: object, *, below: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise InvalidInputError(
            f"{name} must be a whole number from 0 to below {below}, not {value!r:.80}.",
            hint=f"Pass another {name}.",
            option=name,
        )
    return value


def _place_of(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise InvalidInputError(
            f"rank is {rank} and world_size is {world_size}.",
            hint="Give both, or neither: then torch.distributed says.",
        )
    check_counts(world_size=world_size)
    return _check_whole("rank", rank, below=world_size), world_size


def _place_in_group() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    started = environment.started()
    if started > 1:
        raise InvalidInputError(
            f"{started} processes run, but this one knows of no others: all would train on the same samples.",
            hint="Call torch.distributed.init_process_group() first, or give ElasticSampler its rank and world_size.",
            started=started,
        )
    return 0, 1
