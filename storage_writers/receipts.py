"""What a rank hands in after it has written: one receipt, in columns on its way to the coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ckptstore.format.shard import Chunk, Shard, StoredItem, StoredShard, TensorMeta, leaf_bytes_of


@dataclass(frozen=True)
class Receipt:
    """A shard and its chunks in file order. Where each lies follows from their sizes.

    Args:
        shard: As it was stored.
        columns: Name, dtype, shape, offsets, lengths, bytes of each chunk.
        values: Codec and whether it is pickled, by index, of those that are no tensors.
    """

    shard: Shard
    columns: tuple[tuple[Any, ...], ...]
    values: dict[int, tuple[str, bool]]

    @classmethod
    def of(cls, stored: StoredShard) -> Receipt:
        """Return the receipt for a shard."""
        same: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal shapes are pickled once
        rows, values = [], {}
        for index, item in enumerate(stored.items):
            chunk, tensor = item.chunk, item.chunk.tensor
            shape, offsets, lengths = (
                same.setdefault(each, each) for each in (tensor.shape, chunk.offsets, chunk.lengths)
            )
            rows.append((tensor.name, tensor.dtype, shape, offsets, lengths, chunk.nbytes))
            if chunk.codec is not None:
                values[index] = chunk.codec, chunk.pickled
        return cls(stored.shard, tuple(zip(*rows, strict=True)), values)

    def stored(self, tensors: dict[tuple[Any, ...], TensorMeta]) -> StoredShard:
        """Return the shard with its items.

        Args:
            tensors: By name, dtype and shape; gets those that are new, so that all shards share them.
        """
        items = []
        position, leaves = self.shard.header_bytes, 0
        for index, (name, dtype, shape, offsets, lengths, nbytes) in enumerate(zip(*self.columns, strict=True)):
            key = (name, dtype, shape)
            tensor = tensors.get(key) or tensors.setdefault(key, TensorMeta(*key))
            codec, pickled = self.values.get(index, (None, False))
            chunk = Chunk(tensor, offsets, lengths, nbytes, codec, pickled)
            item = StoredItem(chunk, position, leaf_bytes_of(nbytes), leaves)
            items.append(item)
            position += nbytes
            leaves += item.leaf_count
        return StoredShard(self.shard, tuple(items))


def results_of(plan: SavePlan, stored: StoredShard) -> list[WriteResult]:
    """Return what a rank hands in: one result that holds its whole receipt. DCP passes it on and looks at nothing."""
    return [WriteResult(plan.items[0].index, stored.shard.size, Receipt.of(stored))]


def received(results: Iterable[Sequence[WriteResult]]) -> list[StoredShard]:
    """Return the shards that the ranks' results describe; a rank that wrote nothing has none."""
    tensors: dict[tuple[Any, ...], TensorMeta] = {}
    return [result.storage_data.stored(tensors) for of_rank in results for result in of_rank]
