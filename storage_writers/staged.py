"""One state that is staged: copied, read ahead, and handed to the upload piece by piece."""

from __future__ import annotations

import bisect
import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ckptstore.errors import StalledError, UnavailableError
from ckptstore.threads import OwnedThread
from ckptstore.units import MIB
from storage_writers import tensors
from storage_writers.capturing import Captured, Source, held_tensors, is_plain
from storage_writers.copying import Lanes, batches, copied_to
from storage_writers.pool import Arena, Room, aligned

COPY_SECONDS = 600.0
"""How long the upload waits for one tensor's copy."""
JOIN_SECONDS = 60.0
"""How long `end` waits for its threads; the longest thing that they do is to copy one block."""
IDLE_SECONDS = 3600.0
"""How long reading ahead waits for room before it leaves the rest to the upload."""
_BLOCK_BYTES = 64 * MIB


class _Slot:
    """A piece that was read ahead."""

    __slots__ = ("copied", "nbytes", "start", "view")

    def __init__(self, start: int, view: torch.Tensor, nbytes: int) -> None:
        self.start, self.view, self.nbytes, self.copied = start, view, nbytes, False


class _Read:
    """A tensor of the caller's that is read piece by piece, by the upload and ahead of it."""

    __slots__ = ("_blocks", "ahead", "block", "key", "reading")

    def __init__(self, key: str, tensor: torch.Tensor) -> None:
        self.key = key
        self._blocks = tensors.blocks(tensors.copyable(tensor.detach()), block_bytes=tensors.PIECE_BYTES)
        self.block = next(self._blocks, None)
        """The next one that nobody reads yet."""
        self.ahead: deque[_Slot] = deque()
        self.reading = 0

    def draw(self) -> torch.Tensor | None:
        block = self.block
        if block is not None:
            self.block = next(self._blocks, None)
            self.reading += 1
        return block


class Staged:
    """A state of which a save may take its time. `StagingPool.stage` makes it.

    Args:
        captured: The state, taken apart.
        in_file_order: Its tensors, as they will stand in the shard.
        arena: Where they are copied to.
        returned: Called when nothing uses `arena` any more.
    """

    def __init__(
        self, captured: Captured, in_file_order: Sequence[Source], arena: Arena, returned: Callable[[], None]
    ) -> None:
        self._arena, self._returned = arena, returned
        self._lanes = Lanes(source.result().device for source in in_file_order)
        self._room = Room(arena.nbytes)
        self._places = self._placed(in_file_order)
        self._starts = [place.start for place in self._places]
        self.is_whole = not captured.others and all(source.staged is not None for source in in_file_order)
        """Nothing in `state` is the caller's."""
        self.state: dict[str, Any] = captured.state()
        """What is planned and saved: views of the pool; what does not fit or is of an unknown kind is the caller's."""
        self._reads: dict[int, deque[_Read]] = {}
        self._unread = 0
        self._copied = self._all_read = self._ended = False
        self._failure: tuple[str, BaseException] | None = None
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._working = 0

    def begin(self) -> None:
        """Begin to copy. However this ends, `end` is to be called."""
        self._start(self._copy_all, "ckptstore-staging")

    def _placed(self, sources: Sequence[Source]) -> list[Source]:
        """Give a place to each tensor that fits, one after the other; return those that have one."""
        places, at = [], 0
        for source in sources:
            end = at + aligned(source.nbytes)
            if source.nbytes == 0:
                source.staged = torch.empty_like(source.result(), device="cpu")
            elif end <= self._arena.nbytes:
                source.start, at = at, end
                source.staged = self._arena.view(source.start, source.result())
                places.append(source)
        self._room.take(at)
        return places

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._leave()

        thread = OwnedThread(run, name)  # ended at exit by `_end_all`, with a limit
        with self._changed:
            self._threads.append(thread)
            self._working += 1
            try:
                thread.start()
            except BaseException:
                if thread.withdraw():
                    self._threads.remove(thread)
                    self._working -= 1
                raise

    def _leave(self) -> None:
        """Note that a thread is done. The last one, after the end, gives the pool back."""
        with self._changed:
            self._working -= 1
            idle = self._ended and not self._working
        if idle:
            self._give_back()

    # What the training waits for

    def fence(self, *, seconds: float) -> None:
        """Return when every tensor of the caller may be changed: it is copied, or the upload has read it.

        Args:
            seconds: How long it is waited.

        Raises:
            StalledError: It took longer. The tensors must still not be changed.
            UnavailableError: Copying failed; the save cannot succeed.
        """
        self._wait(lambda: self._copied and (self.is_whole or self._all_read), seconds, "the state to be read")

    def wait_copied(self, *, seconds: float) -> None:
        """Return when all that fits is copied.

        Raises:
            StalledError: It took longer than `seconds`.
            UnavailableError: Copying failed.
        """
        self._wait(lambda: self._copied, seconds, "the state to be copied")

    def _wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until it is done, or the save has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._failure or done(), seconds)
            if self._ended or done():
                return
            if self._failure is not None:
                key, error = self._failure
                raise UnavailableError(
                    f"{key} could not be copied into host memory: {type(error).__name__}: {error!s:.300}",
                    hint="Look at the device that it is on, and save again.",
                    key=key,
                ) from error
            raise StalledError(
                f"Waited {seconds} s for {what}.",
                hint="Look at what the store is doing, or raise staging_bytes, so that more is copied at once.",
                seconds=seconds,
            )

    # Copying

    def _copy_all(self) -> None:
        """Copy every tensor that has a place, in file order."""
        batch = list[Source]()
        try:
            for batch in batches(self._places):
                if self._ended:
                    return
                wanted = [copied_to(place) for place in batch if place.wanted]
                if len(batch) == 1:
                    self._copy_blocks(wanted)
                elif wanted:
                    self._lanes.copy(*map(list, zip(*wanted, strict=True)))
                self._mark(batch)
            self._mark([], last=True)
        except BaseException as error:  # noqa: BLE001  (it is raised by whoever waits)
            self._fail(", ".join(place.key for place in batch[:3]), error)

    def _copy_blocks(self, wanted: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy in blocks, so that `end` need not wait for all of a large tensor."""
        for view, tensor in wanted:
            flat, at = view.view(-1), 0
            for block in tensors.blocks(tensor, block_bytes=_BLOCK_BYTES):
                if self._ended:
                    return
                self._lanes.copy([flat[at : at + block.numel()].view(block.shape)], [block])
                at += block.numel()

    def _mark(self, batch: list[Source], *, last: bool = False) -> None:
        self._lanes.finish()
        with self._changed:
            for place in batch:
                place.copied, place.tensor = True, None
                if not place.wanted:
                    self._room.give(place.start, place.nbytes)
            self._copied = last
            self._changed.notify_all()
        batch.clear()

    def _fail(self, key: str, error: BaseException) -> None:
        with self._changed:
            self._failure = key, error
            self._changed.notify_all()

    # What the upload asks for

    def expect(self, planned: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Learn what the upload will ask for: these tensors of `state`, each as often as it stands here, in this order.

        What is staged and not among them gives its room back; what is live and not among them is not waited for.
        """
        if self.is_whole:
            return
        ahead = []
        with self._changed:
            for key, tensor in planned:
                if (place := self._place_of(tensor)) is not None:
                    place.uses += 1
                elif tensor.numel():
                    read = _Read(key, tensor)
                    self._reads.setdefault(id(tensor), deque()).append(read)
                    self._unread += 1
                    if is_plain(tensor):
                        ahead.append(read)
            for place in self._places:
                if not place.uses:
                    place.wanted = False
                    if place.copied:
                        self._room.give(place.start, place.nbytes)
            self._all_read = self._unread == 0
            self._changed.notify_all()
        if ahead and self._arena.nbytes:
            self._start(lambda: self._read_ahead(ahead), "ckptstore-read-ahead")

    def all_read(self) -> None:
        """Learn that the upload will not ask for any other tensor."""
        with self._changed:
            self._all_read = True
            self._changed.notify_all()

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, of `state` or of any other, in pieces that last until the next is asked for.

        Raises:
            StalledError: Its copy did not come.
            UnavailableError: Copying failed, or the save was ended.
        """
        self._check_going_on()
        if reads := self._reads.get(id(tensor)):
            yield from self._pieces_read(reads.popleft())
            return
        place = None if self.is_whole and self._copied else self._place_of(tensor)
        if place is None:
            for piece in tensors.pieces(tensor):
                self._check_going_on()
                yield piece
            return
        self._wait(lambda: place.copied, COPY_SECONDS, f"{place.key} to be copied")
        alone = place.uses == 1 and tensor.is_contiguous() and tensor.numel() * tensor.element_size() == place.nbytes
        given = 0
        for piece in tensors.pieces(tensor):
            self._check_going_on()
            yield piece
            if alone:
                self._give(place.start + given, piece.nbytes)
                given += piece.nbytes
        place.uses -= 1
        if place.uses == 0 and not alone:
            self._give(place.start, place.nbytes)

    def _pieces_read(self, read: _Read) -> Iterator[memoryview]:
        while True:
            with self._changed:
                slot = read.ahead.popleft() if read.ahead else None
                block = read.draw() if slot is None else None
            if slot is not None:
                self._wait(lambda slot=slot: slot.copied, COPY_SECONDS, "what is read ahead")  # type: ignore[misc]
                self._check_going_on()
                yield tensors.bytes_of(slot.view)
                self._give(slot.start, slot.nbytes)
            elif block is not None:
                yield self._lanes.bytes_of(block)
                self._was_read(read)
            else:
                return

    def _check_going_on(self) -> None:
        if self._ended:
            raise UnavailableError("The save was ended while its tensors were read.")

    def _place_of(self, tensor: torch.Tensor) -> Source | None:
        """Return the place that a tensor is a part of; None if it does not stand in the pool."""
        offset = self._arena.offset_of(tensor)
        return None if offset is None else self._places[bisect.bisect(self._starts, offset) - 1]

    def _give(self, start: int, nbytes: int) -> None:
        with self._changed:
            self._room.give(start, nbytes)
            self._changed.notify_all()

    def _was_read(self, read: _Read) -> None:
        """Note that a block of the caller's is no longer needed."""
        with self._changed:
            read.reading -= 1
            if read.block is None and not read.reading:
                self._unread -= 1
                self._all_read = self._unread == 0
            self._changed.notify_all()

    # Reading ahead

    def _read_ahead(self, reads: Sequence[_Read]) -> None:
        """Copy pieces of what is live, in file order, into room that comes back."""
        key = ""
        try:
            for read in reads:
                key = read.key
                while (drawn := self._drawn(read)) is not None:
                    slot, block = drawn
                    self._lanes.copy([slot.view], [block])
                    self._lanes.finish()
                    with self._changed:
                        slot.copied = True
                    self._was_read(read)
        except BaseException as error:  # noqa: BLE001  (it is raised by whoever waits)
            self._fail(key, error)

    def _drawn(self, read: _Read) -> tuple[_Slot, torch.Tensor] | None:
        """Wait for room for the next block of `read`; return None if the upload has read the rest of it."""
        with self._changed:
            while not self._ended and (block := read.block) is not None:
                nbytes = block.numel() * block.element_size()
                if nbytes > self._arena.nbytes:
                    return None
                if (start := self._room.take(nbytes)) is not None:
                    read.draw()
                    slot = _Slot(start, self._arena.view(start, block), nbytes)
                    read.ahead.append(slot)
                    return slot, block
                if not self._changed.wait(IDLE_SECONDS):
                    return None
        return None

    # The end

    def end(self) -> None:
        """Drop every reference and give all room back: the save has ended, well or not. It may be called again."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)
        self.return_idle()  # else a device hangs, and its thread, which may still write into the pool, does it

    def return_idle(self) -> None:
        """Give the pool back if `end` was called, perhaps interrupted, and no thread is in a copy."""
        if self._ended and not any(thread.is_alive() for thread in self._threads):
            self._give_back()

    def _give_back(self) -> None:
        with self._changed:
            returned, self._returned = self._returned, lambda: None
            self.state, self._places, self._starts, self._reads = {}, [], [], {}
            self._arena = Arena(0)
        returned()

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called; a thread may still be in a copy then."""
        return self._ended

    def taken_out(self, value: Any) -> Any:
        """Return a mapping or list of `state` with tensors of its own, to be pickled as a whole.

        A view of the pool would be pickled with all of the pool.

        Raises:
            StalledError: The copies did not come.
            UnavailableError: Copying failed.
        """
        memo: dict[int, Any] = {}
        held = list(held_tensors(value))
        if held:
            self.wait_copied(seconds=COPY_SECONDS)
        for tensor in held:
            memo[id(tensor)] = tensor.detach().clone()
        return copy.deepcopy(value, memo) if held else value
