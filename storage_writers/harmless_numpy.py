"""What numpy's pickles may do: arrays and scalars of plain dtypes, and random generators, checked before they are made.

numpy's own `__setstate__`s trust what they get: with a dtype of objects the raw bytes are pointers, and a position in a
generator's state is an index into its memory. So nothing gets there that numpy itself would not have written.
"""

from __future__ import annotations

import importlib
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np

_CODE = re.compile(
    r"[biufc](?:[1-9]\d?)|[SU]\d{1,9}|[mM]8"
)  # never O (pointers), V (fields) or a type of somebody else
_UNIT = re.compile(r"generic|[YMWDhmsunpfa]s?")
_BITS: dict[str, Any] = {
    name: getattr(np.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
}
_POSITIONS = {"pos": 624, "buffer_pos": 4}  # MT19937 and Philox index their memory by them, unchecked
_MULTIARRAY = ("numpy._core.multiarray", "numpy.core.multiarray")  # the second is where numpy 1 has, and names, it
_NUMERIC = ("numpy._core.numeric", "numpy.core.numeric")
_RANDOM = {
    "numpy.random.bit_generator": ("SeedSequence", "__pyx_unpickle_SeedSequence"),
    "numpy.random._pickle": ("__randomstate_ctor", "__generator_ctor", "__bit_generator_ctor"),
    "numpy.random._mt19937": ("MT19937",),
    "numpy.random._pcg64": ("PCG64", "PCG64DXSM"),
    "numpy.random._philox": ("Philox",),
    "numpy.random._sfc64": ("SFC64",),
}


def want(truth: object, what: str) -> None:
    """Refuse the pickle unless `truth` holds.

    Raises:
        pickle.UnpicklingError: It does not; the message says that `what` is not as it should be.
    """
    if not truth:
        raise pickle.UnpicklingError(f"{what} is not as any plain value has it")


def ints(value: Any, low: int = 0) -> bool:
    """Return whether `value` is a tuple of integers that are at least `low`."""
    return isinstance(value, tuple) and all(type(each) is int and each >= low for each in value)


def _dtype(*args: Any) -> Any:
    want(len(args) == 3 and type(args[0]) is str and args[1:] == (False, True), "a numpy dtype")  # noqa: PLR2004
    want(_CODE.fullmatch(args[0]), f"the numpy dtype {args[0][:20]!r}")
    return np.dtype(args[0], copy=True)  # a copy: the shared one would be changed by what follows


def _build_dtype(dtype: Any, state: Any) -> None:
    """Set the byte order, and the unit of a date; the state must be what numpy writes for just that."""
    want(type(state) is tuple and len(state) in (8, 9) and state[1] in tuple("<>|="), "a numpy dtype's state")
    size = dtype.itemsize // (4 if dtype.kind == "U" else 1)
    name = f"{dtype.kind}{size}"
    if dtype.kind in "mM":
        want(len(state) == 9 and type(state[8]) is tuple and len(state[8]) == 2, "a date's unit")  # noqa: PLR2004
        unit = state[8][1]
        want(type(unit) is tuple and len(unit) == 4 and type(unit[0]) is bytes, "a date's unit")  # noqa: PLR2004
        want(ints(unit[1:], 1) and max(unit[1:]) < 1 << 31, "a date's unit")
        word = unit[0].decode("ascii")
        want(_UNIT.fullmatch(word), "a date's unit")
        name += "" if word == "generic" else f"[{unit[1]}{word}]"
    genuine = np.dtype(state[1] + name).__reduce__()[2]
    want(all(map(_same, state, genuine)) and len(state) == len(genuine), f"the state of the numpy dtype {name}")
    dtype.__setstate__(genuine)


def _same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and type(one) in (int, str, bytes, dict, type(None)) and bool(one == other)


def _check_plain(dtype: Any, raw: Any, shape: Any = ()) -> None:
    want(isinstance(dtype, np.dtype) and type(raw) in (bytes, bytearray) and ints(shape), "an array")
    want(dtype.kind in "biufcSUmM" and not dtype.hasobject and dtype.subdtype is None, "an array's dtype")
    count = math.prod(shape)
    want(len(raw) == count * dtype.itemsize, "the number of bytes of an array")
    want(dtype.itemsize or count <= 1, "an array of nothing")
    if dtype.kind == "U" and raw:
        points = np.frombuffer(raw, np.dtype("u4").newbyteorder(dtype.byteorder))
        want(points.max() <= 0x10FFFF, "the text in an array")  # noqa: PLR2004  (the last code point)


def _scalar(*args: Any) -> Any:
    want(len(args) == 2 and type(args[1]) is bytes, "a numpy scalar")  # noqa: PLR2004
    _check_plain(*args)
    make: Any = np.int8(0).__reduce__()[0]  # numpy 1 and 2 keep it in different places
    return make(*args)


def _reconstruct(*args: Any) -> Any:
    want(len(args) == 3 and args[0] is np.ndarray, "an array")  # noqa: PLR2004
    want(_same(args[1], (0,)) and (_same(args[2], b"b") or _same(args[2], "b")), "an array")
    return np.empty(0, "b")


def _build_array(array: Any, state: Any) -> None:
    want(type(state) is tuple and len(state) == 5 and type(state[4]) is bytes, "an array's state")  # noqa: PLR2004
    version, shape, dtype, fortran, raw = state
    want(type(array) is np.ndarray and type(version) is int and type(fortran) in (bool, int), "an array's state")
    _check_plain(dtype, raw, shape)
    array.__setstate__(state)


def _frombuffer(*args: Any) -> Any:
    want(len(args) == 4 and type(args[3]) is str and args[3] in ("C", "F"), "an array")  # noqa: PLR2004
    raw, dtype, shape, order = args
    _check_plain(dtype, raw, shape)
    return np.ndarray(shape, dtype, raw, order=order)


def _bits(*args: Any) -> Any:
    want(len(args) == 1, "a bit generator")
    for name, kind in _BITS.items():
        if args[0] is kind or (type(args[0]) is str and args[0] == name):
            return kind()
    raise pickle.UnpicklingError("it is not a bit generator of numpy")


def _of_bits(kind: Any) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        want(len(args) == 1, "a random generator")
        return kind(args[0] if type(args[0]) in _BITS.values() else _bits(args[0]))

    return make


def _seed(*args: Any) -> Any:
    want(len(args) == 3 and args[0] is np.random.SeedSequence, "a seed")  # noqa: PLR2004
    want(type(args[1]) is int and args[2] is None, "a seed")
    make = vars(importlib.import_module("numpy.random.bit_generator"))["__pyx_unpickle_SeedSequence"]
    return make(*args)


def _build_seed(seed: Any, state: Any) -> None:
    want(type(state) is tuple and len(state) == 5, "a seed's state")  # noqa: PLR2004
    entropy, spawned, pool, size, key = state
    numbers = tuple(entropy) if type(entropy) in (list, tuple) else () if entropy is None else (entropy,)
    if isinstance(entropy, np.ndarray):
        want(entropy.dtype.kind in "iu" and entropy.ndim == 1, "a seed's entropy")
    else:
        want(all(isinstance(each, int | np.integer) for each in numbers), "a seed's entropy")
    want(ints((spawned, size)) and ints(key), "a seed's state")
    want(type(pool) is np.ndarray and pool.dtype == np.uint32 and pool.shape == (size,), "a seed's pool")
    want(size >= 4, "a seed's pool")  # noqa: PLR2004  (the least that numpy makes)
    seed.__setstate_cython__(state)


def _build_bits(bits: Any, state: Any) -> None:
    if type(state) is tuple:
        want(len(state) == 2 and type(state[1]) in (np.random.SeedSequence, type(None)), "a generator's state")  # noqa: PLR2004
    want(type(state[0] if type(state) is tuple else state) is dict, "a generator's state")
    bits.__setstate__(state)
    _check_positions(bits)


def _build_random(random: Any, state: Any) -> None:
    want(type(state) is dict, "a generator's state")
    random.__setstate__(state)
    _check_positions(random._bit_generator)  # noqa: SLF001  (RandomState has no public name for it)


def _check_positions(bits: Any) -> None:
    state = bits.state
    for name, last in _POSITIONS.items():
        want(0 <= state.get(name, state["state"].get(name, 0)) <= last, "the position of a generator")


def names() -> dict[tuple[str, str], Any]:
    """Return what may be found by module and name: the functions as our own, which check what they are given."""
    table: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
    for module in _MULTIARRAY:
        table |= {(module, "_reconstruct"): _reconstruct, (module, "scalar"): _scalar}
    table |= {(module, "_frombuffer"): _frombuffer for module in _NUMERIC}
    ours = {
        "__pyx_unpickle_SeedSequence": _seed,
        "__bit_generator_ctor": _bits,
        "__generator_ctor": _GENERATOR,
        "__randomstate_ctor": _RANDOM_STATE,
        "SeedSequence": np.random.SeedSequence,
    }
    for module, of_it in _RANDOM.items():
        table |= {(module, name): (ours | _BITS)[name] for name in of_it}
    return table


_GENERATOR, _RANDOM_STATE = _of_bits(np.random.Generator), _of_bits(np.random.RandomState)
CALLS: dict[Any, Callable[..., Any]] = {
    np.dtype: _dtype,
    **{ours: ours for ours in (_reconstruct, _scalar, _frombuffer, _seed, _bits, _GENERATOR, _RANDOM_STATE)},
}
BUILDS: tuple[tuple[Any, Callable[[Any, Any], None]], ...] = (
    (np.dtype, _build_dtype),
    (np.ndarray, _build_array),
    (np.random.SeedSequence, _build_seed),
    (tuple(_BITS.values()), _build_bits),
    ((np.random.Generator, np.random.RandomState), _build_random),
)
