"""The state of one parameter, which may be nested, as tensors by path and a tree that says what stands where.

A tree is `["tensor", dtype, shape]`, `["list", [tree, ...]]`, `["tuple", [tree, ...]]`, `["dict", [[key, tree], ...]]`
or `["value", value]`: plain enough for typed JSON. `exp_avg` is a tensor; L-BFGS has lists of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckptstore.errors import InvalidInputError, UnsupportedError

MAX_DEPTH = 16

Tree = list[Any]

_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "dict": dict}


def taken_apart(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Tree:
    """Return the tree of `value`. Its tensors are put into `tensors` by path: detached, not copied.

    Raises:
        UnsupportedError: It is nested too deeply, holds a sparse tensor, or a container that is not known.
        InvalidInputError: Two tensors have one path.
    """
    if path.count(".") > MAX_DEPTH:
        raise UnsupportedError(f"The state {path:.200} is nested too deeply.", hint="Keep it flat.", path=path[:200])
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise UnsupportedError(
                f"The state {path} is a tensor of layout {value.layout}.",
                hint="Only dense state is stored: use an optimizer that keeps its state dense.",
                path=path,
            )
        if path in tensors:
            raise InvalidInputError(f"Two tensors of the state have the path {path}.", hint="Rename one.", path=path)
        tensors[path] = value.detach()
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if type(value) is dict:
        return ["dict", [[key, taken_apart(inner, f"{path}.{key}", tensors)] for key, inner in value.items()]]
    if type(value) in (list, tuple):
        trees = [taken_apart(inner, f"{path}.{index}", tensors) for index, inner in enumerate(value)]
        return [type(value).__name__, trees]
    if isinstance(value, list | tuple | dict):
        raise UnsupportedError(
            f"The state {path} is a {type(value).__module__}.{type(value).__qualname__}, which is not stored.",
            hint="Use a plain list, tuple or dict.",
            path=path,
        )
    return ["value", copy.deepcopy(value)]


def put_together(tree: Tree, path: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that was taken apart, with `tensors` in it."""
    kind = tree[0]
    if kind == "tensor":
        return tensors[path]
    if kind == "value":
        return copy.deepcopy(tree[1])
    if kind == "dict":
        return {key: put_together(inner, f"{path}.{key}", tensors) for key, inner in tree[1]}
    return _CONTAINERS[kind](put_together(inner, f"{path}.{index}", tensors) for index, inner in enumerate(tree[1]))


def tensors_in(tree: Tree, path: str) -> Iterator[tuple[str, str, list[int]]]:
    """Yield path, dtype and shape of each tensor in a tree."""
    if tree[0] == "tensor":
        yield path, tree[1], list(tree[2])
    elif tree[0] == "dict":
        for key, inner in tree[1]:
            yield from tensors_in(inner, f"{path}.{key}")
    elif tree[0] in _CONTAINERS:
        for index, inner in enumerate(tree[1]):
            yield from tensors_in(inner, f"{path}.{index}")


def reshaped(tree: Tree, shape: list[int], new_shape: list[int]) -> Tree:
    """Return the tree with tensors of one shape said to have another."""
    if tree[0] == "tensor":
        return [*tree[:2], new_shape] if list(tree[2]) == shape else list(tree)
    if tree[0] == "dict":
        return ["dict", [[key, reshaped(inner, shape, new_shape)] for key, inner in tree[1]]]
    if tree[0] in _CONTAINERS:
        return [tree[0], [reshaped(inner, shape, new_shape) for inner in tree[1]]]
    return list(tree)
