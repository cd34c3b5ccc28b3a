"""A value cut into tensors, which are stored and resharded as tensors, and the rest, which typed JSON can hold.

`split` leaves a `TensorRef` where it took a tensor out; `targets` says what to load into; `join` puts all back.
Containers are rebuilt, never changed: the caller's tree stays as it is.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptstore.errors import IncompatibleStateError, InvalidInputError, UnsupportedError
from ckptstore.format.values import MAX_DEPTH
from ckptstore.training.values import MAX_TENSOR_BYTES, TensorRef, why_not_inline
from storage_writers.capturing import is_plain

__all__ = ["INLINE_BYTES", "TensorRef", "join", "split", "targets"]

INLINE_BYTES = 4096
"""Tensors of the CPU up to this stay in the value."""
MAX_KEY_LENGTH = 400

_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]+")
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, deque)

_Path = tuple[Any, ...]


def split(value: Any, *, prefix: str, inline_bytes: int = INLINE_BYTES) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors of a tree by key, and the tree with a `TensorRef` in the place of each.

    It looks into dict, list, tuple, OrderedDict, defaultdict and deque; anything else is left as it is.

    Args:
        value: Nothing in it is changed, copied or kept in another form: what is returned refers to the same tensors,
            detached.
        prefix: Keys are `prefix.path`, as in `ema.shadow.0.weight`; where the path has no good name or is taken,
            `prefix.tensor-NUMBER`.
        inline_bytes: Plain tensors of the CPU of at most so many bytes stay in the tree, each a value of its own. Of
            the others those that are the same memory get one key.

    Raises:
        UnsupportedError: A tensor is sparse, quantised or of a class whose elements are not all of it, a set or a key
            holds a tensor, or the tree is deeper than 64 or holds itself.
        InvalidInputError: `inline_bytes` is not within 0 and 1 MiB, or a `TensorRef` stands in the tree already.
    """
    if type(inline_bytes) is not int or not 0 <= inline_bytes <= MAX_TENSOR_BYTES:
        raise InvalidInputError(
            f"inline_bytes is {inline_bytes!r:.40}; it must be within 0 and {MAX_TENSOR_BYTES}.",
            hint="Leave it out, or give a number of bytes.",
        )
    cutter = _Cutter(prefix, inline_bytes)
    return cutter.tensors, _mapped(value, cutter.cut, ())


def join(value: Any, tensors: Mapping[str, torch.Tensor], *, like: Any = None) -> Any:
    """Return a tree as it was before `split`: where one key stands twice, one tensor does.

    Args:
        value: What `split` left.
        tensors: By key; it may hold others.
        like: The tree that the target has now. Where it has a DTensor, a tensor that stayed in the value becomes one.

    Raises:
        IncompatibleStateError: A tensor is missing, or has another dtype or shape than the one that was cut out.
    """

    def put_back(found: Any, path: _Path) -> Any:
        if type(found) is not TensorRef:
            return _laid_out(found, _at(like, path)) if isinstance(found, torch.Tensor) else found
        tensor = tensors.get(found.key)
        if tensor is None:
            raise IncompatibleStateError(
                f"The tensor {found.key} of {_shown(path)} is missing.", hint="Load it, too.", key=found.key
            )
        if (tensor.dtype, tensor.shape) != (found.dtype, found.shape):
            raise IncompatibleStateError(
                f"{found.key} was saved as {found.dtype} {list(found.shape)} and is {tensor.dtype} "
                f"{list(tensor.shape)} now.",
                hint="Load into what `targets` returns.",
                key=found.key,
            )
        return tensor

    return _mapped(value, put_back, ())


def targets(value: Any, like: Any = None) -> dict[str, torch.Tensor]:
    """Return memory to load each tensor of a tree into, by key: of the saved dtype and shape, none of it `like`'s own.

    Args:
        value: What `split` left.
        like: The tree that the target has now. Where a tensor of the saved shape stands at the same place, what is
            returned has its device and, if it is a DTensor, its mesh and placements. Elsewhere it is on the CPU, whole.

    Raises:
        UnsupportedError: The tree is deeper than 64.
    """
    made: dict[str, torch.Tensor] = {}
    fitting: set[str] = set()
    for ref, path in _refs(value):
        if ref.key in fitting:
            continue
        model = _at(like, path)
        if isinstance(model, torch.Tensor) and model.shape == ref.shape and _is_known(model):
            made[ref.key] = _like(model, ref)
            fitting.add(ref.key)
        elif ref.key not in made:
            made[ref.key] = torch.empty(ref.shape, dtype=ref.dtype, device="cpu")
    return made


class _Cutter:
    """Takes tensors out and gives them keys."""

    def __init__(self, prefix: str, inline_bytes: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix, self._inline_bytes = prefix, inline_bytes
        self._known: dict[tuple[object, ...], TensorRef] = {}

    def cut(self, found: Any, path: _Path) -> Any:
        if type(found) is TensorRef:
            raise InvalidInputError(
                f"{_shown(path)} is a TensorRef: this tree was split before.",
                hint="Join it first, or split its source.",
            )
        if isinstance(found, set | frozenset) and any(isinstance(each, torch.Tensor) for each in found):
            raise _refused(path, "is a set that holds tensors, which would not be found in it again")
        if isinstance(found, dict) and any(isinstance(key, torch.Tensor) for key in found):
            raise _refused(path, "has a tensor as a key, which would not be found again")
        if not isinstance(found, torch.Tensor):
            return found
        if not _is_known(found):
            kind = type(found)
            raise _refused(
                path, f"is a {kind.__module__}.{kind.__qualname__} of {found.dtype}, {found.layout}, on {found.device}"
            )
        tensor = found.detach()
        if why_not_inline(tensor) is None and tensor.numel() * tensor.element_size() <= self._inline_bytes:
            return tensor
        ref = self._known.get(identity := _identity(tensor))
        if ref is None:
            ref = self._known[identity] = TensorRef(self._key(path), tensor.dtype, tensor.shape)
            self.tensors[ref.key] = tensor
        return ref

    def _key(self, path: _Path) -> str:
        if path and all(type(step) in (str, int) and _NAME.fullmatch(str(step)) for step in path):
            key = ".".join([self._prefix, *map(str, path)])
            if len(key) <= MAX_KEY_LENGTH and key not in self.tensors:
                return key
        number = len(self.tensors)
        while (key := f"{self._prefix}.tensor-{number}") in self.tensors:
            number += 1
        return key


def _mapped(value: Any, change: Callable[[Any, _Path], Any], path: _Path) -> Any:
    """Return a tree with each thing in it that is no container changed; a container is seen before what it holds."""
    found = change(value, path)
    kind = type(found)
    if kind not in _CONTAINERS:
        return found
    if len(path) >= MAX_DEPTH:
        raise _too_deep(path)
    if kind in (list, tuple):
        return kind(_mapped(each, change, (*path, index)) for index, each in enumerate(found))
    if kind is deque:
        return deque((_mapped(each, change, (*path, index)) for index, each in enumerate(found)), found.maxlen)
    pairs = ((key, _mapped(each, change, (*path, key))) for key, each in found.items())
    return defaultdict(found.default_factory, pairs) if kind is defaultdict else kind(pairs)


def _refs(value: Any) -> Iterator[tuple[TensorRef, _Path]]:
    """Yield what stands for tensors in a tree, and where."""
    refs: list[tuple[TensorRef, _Path]] = []

    def look(found: Any, path: _Path) -> Any:
        if type(found) is TensorRef:
            refs.append((found, path))
        return found

    _mapped(value, look, ())
    yield from refs


def _at(tree: Any, path: _Path) -> Any:
    """Return what stands at a place of another tree, or None."""
    for step in path:
        if isinstance(tree, Mapping):
            tree = tree.get(step)  # not [step]: a defaultdict would make what it lacks
        elif isinstance(tree, list | tuple | deque):
            tree = tree[step] if type(step) is int and step < len(tree) else None
        else:
            return None
    return tree


def _is_known(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its elements in memory, here or over ranks, and nothing more."""
    if type(tensor) is DTensor:
        return is_plain(tensor._local_tensor)  # noqa: SLF001  (to_local is autograd's)
    return is_plain(tensor)


def _like(model: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty_like(model.detach(), dtype=ref.dtype)


def _laid_out(tensor: torch.Tensor, model: Any) -> torch.Tensor:
    """Return a tensor that every rank has whole as `model` is laid out, if that is a DTensor of its shape."""
    if not isinstance(model, DTensor) or model.shape != tensor.shape:
        return tensor
    mesh = model.device_mesh
    return distribute_tensor(tensor.to(model.device), mesh, model.placements, src_data_rank=None)


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common that are the same elements in the same memory."""
    local, layout = tensor, None
    if isinstance(tensor, DTensor):
        local, layout = tensor._local_tensor, (id(tensor.device_mesh), tensor.placements, tensor.shape)  # noqa: SLF001  (as above)
    if not local.numel():
        return (id(tensor),)
    lazy = local.is_conj(), local.is_neg()
    return local.data_ptr(), local.dtype, local.shape, local.stride(), local.device, lazy, layout


def _shown(path: _Path) -> str:
    return "value" + "".join(f"[{step!r:.60}]" for step in path)


def _refused(path: _Path, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{_shown(path)} {what}.", hint="Store dense tensors in lists and dicts in its place.", path=_shown(path)
    )


def _too_deep(path: _Path) -> UnsupportedError:
    shown = _shown(path[:8])
    return UnsupportedError(
        f"{shown}… is nested deeper than {MAX_DEPTH}, or holds itself.", hint="Store it flat.", path=shown
    )
