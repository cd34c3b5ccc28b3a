"""One checkpoint of a run: what it says of itself, and its tensors as NumPy. It only forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import InvalidInputError, NotFoundError, UnsupportedError
from ckptstore.format.codec import Part
from ckptstore.format.dtypes import array_dtype
from ckptstore.format.records import Commit
from ckptstore.format.shard import Shard, StoredItem, TensorMeta
from ckptstore.format.value_types import ValueTypes, standard_types
from ckptstore.format.values import CODEC, MAX_VALUE_BYTES, decode_value
from ckptstore.options import TransferOptions
from ckptstore.protocol.fold import Committed
from ckptstore.protocol.log import RunLog
from ckptstore.protocol.meanwhile import reading
from ckptstore.protocol.parts import load_documents, load_parts
from ckptstore.protocol.traces import read_trace
from ckptstore.transfer.assemble import box_of, read_bytes, whole

_PLACES = "Checkpoint.read gives a tensor, storage_writers.load what DCP saved."


@dataclass(frozen=True, slots=True)
class Key:
    """What a checkpoint says of one of its keys.

    Args:
        name: Fully qualified.
        dtype: torch's name without the module, or `bytes` for a value that is not a tensor.
        shape: Global shape; `(nbytes,)` for `bytes`.
        nbytes: Stored bytes.
        codec: Of `bytes`: what they are, `torch.save` or `ckptstore.json/1`, which `Checkpoint.value` reads. Of a
            tensor None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    codec: str | None = None


class Checkpoint:
    """One committed moment of a run. Got from a `CheckpointStore`, never made by hand."""

    def __init__(
        self,
        log: RunLog,
        committed: Committed,
        transfer: TransferOptions,
    ) -> None:
        self._log, self._store, self._transfer = log, log.store, transfer
        self.committed = committed

    @property
    def seq(self) -> int:
        """Its identity: the slot of its commit."""
        return self.committed.seq

    @property
    def checkpoint_id(self) -> str:
        """Its name; a label that may repeat."""
        return self.commit.checkpoint_id

    @property
    def exact_name(self) -> str:
        """What finds this very one, and no later one of its name: `name@seq`."""
        return self.committed.exact_name

    @property
    def global_step(self) -> int | None:
        """The step it was saved at, if that was said; a label that may repeat."""
        return self.commit.global_step

    @property
    def committed_at(self) -> str:
        """When its record was made, by the trainer's clock: ISO 8601 in UTC. For people; nothing is decided by it."""
        return self.committed.written_at

    @property
    def saved_world_size(self) -> int:
        """How many ranks saved it."""
        return self.commit.saved_world_size

    @property
    def metrics(self) -> Mapping[str, float]:
        """What was measured when it was saved."""
        return self.commit.metrics

    @property
    def commit(self) -> Commit:
        """The whole commit record."""
        return self.committed.commit

    @property
    def verified(self) -> str | None:
        """The strongest level at which it was verified since, as the log said when this was asked for, or None."""
        return self.committed.verified

    @property
    def proved(self) -> str | None:
        """The verdict on the last resume from it that was proved, as the log said when this was asked for, or None."""
        return self.committed.proved

    def trace(self) -> Mapping[str, Any] | None:
        """Return what the run did right after it, as JSON; None if that was never stored. Asks the store each time.

        Raises:
            IntegrityError: It is damaged, not signed as it must be, or another checkpoint's: no trace. The checkpoint
                is none the worse.
            UnsupportedError: A newer version wrote it.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        return read_trace(self._store, self.committed, signing=self._log.options.signing)

    def __repr__(self) -> str:
        return f"Checkpoint({self.checkpoint_id!r}, seq={self.seq}, step={self.global_step})"

    @cached_property
    def keys(self) -> Mapping[str, Key]:
        """Every key with its dtype and shape, by name, sorted. Reads the manifest parts once, verified.

        Raises:
            IntegrityError: A part is missing or damaged.
            ConflictError: It was retired meanwhile.
            UnsupportedError: A newer version wrote it.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        found: dict[TensorMeta, list[StoredItem]] = {}
        for _, item in (each for items in self._items.values() for each in items):
            found.setdefault(item.chunk.tensor, []).append(item)
        return {
            tensor.name: Key(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                sum(item.chunk.nbytes for item in items),
                items[0].chunk.codec,
            )
            for tensor, items in sorted(found.items(), key=lambda pair: pair[0].name)
        }

    def documents(self) -> Mapping[str, Any]:
        """Return what stands behind the fingerprints: JSON by name, read once and verified; none if none was given.

        Raises:
            IntegrityError: They are missing or damaged.
            ConflictError: It was retired meanwhile.
            UnsupportedError: A newer version wrote them.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        return self._documents

    def read(self, key: str, index: Sequence[slice] = ()) -> npt.NDArray[np.generic]:
        """Return a tensor, or a box of it, as NumPy; only the leaves that it needs are fetched, each verified.

        Args:
            key: Fully qualified name.
            index: One slice per dimension, without steps; missing ones are whole.

        Returns:
            An array of the saved dtype (`ml_dtypes` for bfloat16 and float8), owned by the caller. Where NumPy has no
            such dtype, uint8 with one axis more, for an element's bytes. A value that is no tensor comes as the uint8
            of its stored bytes; nothing is ever unpickled here.

        Raises:
            NotFoundError: The checkpoint has no such key.
            InvalidInputError: The index is not a box of it.
            IntegrityError: A byte is not what was written.
            ConflictError: It was retired meanwhile.
            UnsupportedError: A newer version wrote it.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        items = self._items_of(key)
        tensor = items[0][1].chunk.tensor
        box = box_of(tensor, index) if index else whole(tensor)
        with reading(self._log, self.committed):
            raw = read_bytes(self._store, items, box, options=self._transfer)
        dtype = array_dtype(tensor.dtype)
        return raw if dtype is None else raw.view(dtype)[..., 0]

    def value(self, key: str, *, types: ValueTypes | None = None) -> Any:
        """Return a typed value, one that was saved as a `storage_writers.TypedValue`, with the types that it had.

        Its bytes are verified. Nothing is unpickled, imported or called because they say so.

        Args:
            key: Fully qualified name.
            types: What it may hold beyond Python's own types, NumPy's and the standard library's: without them,
                `ckptstore.format.value_types.standard_types()`.

        Raises:
            NotFoundError: The checkpoint has no such key.
            UnsupportedError: It is no typed value, or holds a type that is not in `types`; or a newer version wrote it.
            IntegrityError: A byte is not what was written, or the document is none that a writer writes.
            ConflictError: It was retired meanwhile.
            InvalidInputError: It is larger than 64 MiB.
            UnavailableError: The store could not be read. AccessDeniedError: it refused.
        """
        chunk = self._items_of(key)[0][1].chunk
        if chunk.codec != CODEC:
            stored = f"a {chunk.tensor.dtype} tensor {list(chunk.tensor.shape)}" if chunk.codec is None else chunk.codec
            raise UnsupportedError(
                f"{key} is no typed value: it is stored as {stored}.", hint=_PLACES, key=key, codec=chunk.codec
            )
        if chunk.nbytes > MAX_VALUE_BYTES:
            raise InvalidInputError(
                f"{key} has {chunk.nbytes} bytes; a typed value has at most {MAX_VALUE_BYTES}.",
                hint="Read its bytes with Checkpoint.read.",
                key=key,
            )
        body = self.read(key).tobytes()
        return decode_value(body, types=standard_types() if types is None else types, name=key)

    def _items_of(self, key: str) -> list[tuple[Shard, StoredItem]]:
        items = self._items.get(key)
        if items is None:
            raise NotFoundError(
                f"{self.checkpoint_id} (seq {self.seq}) has no key {key!r}; it has {len(self._items)} others.",
                hint=f"Run `ckptstore show {self._store.url} {self.checkpoint_id} --keys`.",
                key=key,
            )
        return items

    @cached_property
    def _parts(self) -> Sequence[Part]:
        with reading(self._log, self.committed):
            return load_parts(self._store, self.committed)

    @cached_property
    def _items(self) -> Mapping[str, list[tuple[Shard, StoredItem]]]:
        items: dict[str, list[tuple[Shard, StoredItem]]] = {}
        for part in self._parts:
            for stored in part.shards:
                for item in stored.items:
                    items.setdefault(item.chunk.tensor.name, []).append((stored.shard, item))
        return items

    @cached_property
    def _documents(self) -> Mapping[str, Any]:
        with reading(self._log, self.committed):
            return load_documents(self._store, self.committed)
