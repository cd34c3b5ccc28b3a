"""A state taken apart for staging: its tensors, to be copied later, and everything else by value, now."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor

from ckptstore.errors import CkptStoreError, UnsupportedError
from ckptstore.format.dtypes import DTYPES
from storage_writers import tensors
from storage_writers.typed import TypedValue

_FIXED = frozenset(
    {int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, TypedValue}
)
"""Types whose values nobody can change."""

_PLAIN = torch.Tensor.__torch_dispatch__
_STORABLE = frozenset(getattr(torch, name) for name, dtype in DTYPES.items() if not dtype.refused)


class Source:
    """One tensor of the caller, of whatever rank, device, strides and element type, and its copy.

    Args:
        key: Where it stands in the state.
        tensor: The caller's, detached.
    """

    __slots__ = ("copied", "key", "nbytes", "staged", "start", "tensor", "uses", "wanted", "width")

    def __init__(self, key: str, tensor: torch.Tensor) -> None:
        self.key = key
        self.tensor: torch.Tensor | None = tensor
        """The caller's, until it is copied."""
        self.width = tensor.element_size()
        self.nbytes = tensor.numel() * self.width
        self.staged: torch.Tensor | None = None
        """Its copy, which stands in the state that is saved; None if it has no place in the pool."""
        self.start, self.copied = 0, False
        self.wanted, self.uses = True, 0
        """Whether, and how often, the upload will ask for it."""

    def result(self) -> torch.Tensor:
        """Return what stands in the state that is saved: its copy, or itself if it has none."""
        result = self.tensor if self.staged is None else self.staged
        assert result is not None  # noqa: S101  (what has no copy is never let go)
        return result


class _Distributed:
    """A DTensor, whose local part is staged."""

    def __init__(self, whole: DTensor, local: Source) -> None:
        self._whole, self._local = whole, local

    def result(self) -> torch.Tensor:
        if self._local.staged is None:
            return self._whole
        spec = self._whole._spec  # noqa: SLF001  (DTensor makes itself from a local part and this)
        local = self._local.staged
        # It takes over where its local part begins in its memory, of which it has none: torch crashes when it pickles
        # a DTensor that seems to begin anywhere but at 0.
        made = DTensor(local.as_strided(local.shape, local.stride(), 0), spec, requires_grad=False)  # type: ignore[no-untyped-call]
        made._local_tensor = local  # noqa: SLF001  (as said)
        return made


class _Sharded:
    """A ShardedTensor, whose local shards are staged."""

    def __init__(self, whole: ShardedTensor, locals_: list[Source]) -> None:
        self._whole, self._locals = whole, locals_

    def result(self) -> torch.Tensor:
        whole = self._whole
        properties = whole.metadata().tensor_properties
        made = ShardedTensor.__new__(
            ShardedTensor,
            whole.sharding_spec(),
            whole.size(),
            dtype=properties.dtype,
            layout=properties.layout,
            pin_memory=properties.pin_memory,
            requires_grad=False,
        )
        made.__dict__.update({name: value for name, value in vars(whole).items() if name != "_sharded_tensor_id"})
        made._local_shards = [  # noqa: SLF001  (its constructor is collective)
            Shard(source.result(), shard.metadata)
            for source, shard in zip(self._locals, whole.local_shards(), strict=True)
        ]
        return made  # type: ignore[no-any-return]


class Captured:
    """What was found in a state.

    Args:
        state_dict: The caller's. Nothing in it is changed.

    Raises:
        InvalidInputError: A tensor has no memory; it is named.
        UnsupportedError: A value cannot be copied; it is named.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.sources: list[Source] = []
        """Every tensor that can be staged, once, in the state's order."""
        self.others = False
        """There are tensors of a kind that cannot be staged; they stay the caller's."""
        self._seen: dict[tuple[object, ...], Source] = {}
        self._open: list[tuple[Any, Any, Source | _Distributed | _Sharded]] = []
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  (a subclass's own idea of `shape` is not asked)
            self._state: dict[str, Any] = self._taken(state_dict, "")

    def state(self) -> dict[str, Any]:
        """Return the state that is saved, in which each tensor is its `Source.result`."""
        for container, key, found in self._open:
            container[key] = found.result()
        self._open.clear()
        self._seen.clear()
        return self._state

    def _taken(self, value: Any, key: str) -> Any:
        """Return a value by value. Tensors are left open where DCP's planner finds them: in mappings and lists."""
        if type(value) in _FIXED:
            return value
        try:
            if isinstance(value, Mapping):
                taken = _like(value, key)
                for name, inner in value.items():
                    self._put(taken, name, inner, f"{key}.{name}" if key else str(name))
                return taken
            if isinstance(value, list) and any(isinstance(inner, torch.Tensor | Mapping | list) for inner in value):
                listed: list[Any] = [None] * len(value)
                for index, inner in enumerate(value):
                    self._put(listed, index, inner, f"{key}.{index}")
                return listed
        except (CkptStoreError, MemoryError):
            raise
        except Exception as error:  # a mapping of the user's may refuse; what holds itself has no end
            raise _not_copied(key, error) from error
        return _by_value(value, key)

    def _put(self, container: Any, name: Any, value: Any, key: str) -> None:
        if not isinstance(value, torch.Tensor):
            container[name] = self._taken(value, key)
            return
        container[name] = value  # keeps its place in the order
        if (found := self._found(value, key)) is not None:
            self._open.append((container, name, found))
        else:
            self.others = True

    def _found(self, tensor: torch.Tensor, key: str) -> Source | _Distributed | _Sharded | None:
        if type(tensor) is DTensor:
            with torch.no_grad():
                local = tensor.to_local()
            return _Distributed(tensor, self._source(local, key)) if is_plain(local) else None
        if type(tensor) is ShardedTensor:
            locals_ = [shard.tensor for shard in tensor.local_shards()]
            if not all(map(is_plain, locals_)):
                return None
            return _Sharded(tensor, [self._source(local, key) for local in locals_])
        return self._source(tensor, key) if is_plain(tensor) else None

    def _source(self, tensor: torch.Tensor, key: str) -> Source:
        if tensor.requires_grad:
            tensor = tensor.detach()
        tensors.check_source(tensor, key=key)
        lazy = tensor.is_conj(), tensor.is_neg()
        seen = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, lazy)
        source = self._seen.get(seen)
        if source is None:
            source = self._seen[seen] = Source(key, tensor)
            self.sources.append(source)
        return source


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its elements in memory, and nothing more."""
    return (
        type(tensor).__torch_dispatch__ is _PLAIN
        and tensor.layout is torch.strided
        and tensor.dtype in _STORABLE
        and not tensor.is_meta
    )


def _like(mapping: Mapping[Any, Any], key: str) -> Any:
    """Return a mapping to fill: of the same type if that is a kind of dict, with what is attached to it."""
    if type(mapping) is dict or not isinstance(mapping, dict):
        return {}
    made = copy.copy(mapping)
    if attached := getattr(made, "__dict__", None):
        attached.update({name: _by_value(value, key) for name, value in attached.items()})
    return made


def _by_value(value: Any, key: str) -> Any:
    """Return a copy of what DCP's planner pickles, tensors in it included.

    Raises:
        UnsupportedError: It cannot be copied.
    """
    try:
        if type(value) is tuple:
            return tuple(_by_value(inner, key) for inner in value)
        if isinstance(value, torch.Tensor) and (value.grad_fn is not None or value.device.type != "cpu"):
            return value.detach().to("cpu", copy=True)  # a deep copy would stay on the device, or be refused
        return copy.deepcopy(value)
    except (CkptStoreError, MemoryError):  # that there is no room says nothing of the value
        raise
    except Exception as error:
        raise _not_copied(key, error) from error


def _not_copied(key: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"The value of {key:.200} cannot be copied for a background save: {type(error).__name__}: {error!s:.300}",
        hint="Leave it out of the state, or store plain values instead.",
        key=key[:200],
    )


def held_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that stand in mappings and lists, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from held_tensors(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from held_tensors(inner)
