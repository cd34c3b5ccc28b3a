"""Values that are not tensors, as typed JSON."""

import dataclasses
import enum
import json
import math
import random
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import IntegrityError, InvalidInputError, UnsupportedError
from ckptstore.format.value_types import standard_types
from ckptstore.format.values import decode_value, encode_value


class Color(enum.Enum):
    RED = 1
    CRIMSON = 1  # noqa: PIE796  (an alias is the same member)
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Cursor:
    shard: int
    seen: set = dataclasses.field(default_factory=set)
    note: str = dataclasses.field(default="", init=False)


def types():
    known = standard_types()
    known.register_enum(Color, "tests.Color")
    known.register_enum(Level, "tests.Level")
    known.register_enum(Access, "tests.Access")
    known.register_dataclass(Cursor, "tests.Cursor")
    return known


def again(value):
    return decode_value(encode_value(value, types=types()), types=types())


def same(one, other):  # noqa: PLR0911  (one line a type)
    """Whether two values have the same types, order and bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and not isinstance(one, np.generic):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None), getattr(other, "default_factory", None)
        return factories[0] is factories[1] and same(list(one.items()), list(other.items()))
    if isinstance(one, datetime):
        return (one, one.fold, repr(one.tzinfo)) == (other, other.fold, repr(other.tzinfo))
    return one == other


VALUES = {
    "none": None,
    "bools": [True, False, 1, 0],
    "an int of any size": [2**53, -(2**53), 2**53 - 1, 10**6000, -(10**6000)],
    "a float that looks like an int": [1.0, -0.0, 0.0, 1e16, 1e300, 5e-324],
    "floats that are no numbers": [math.inf, -math.inf, math.nan],
    "a NaN with other bits": struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    "text": ["", "ñ", "\0", "\u2028", "\ud800 alone", "$int"],
    "bytes": [b"", b"\x00\xff" * 9],
    "a list and a tuple": ([1, (2,)], (), []),
    "sets": [set(), {1, "1", (2,), None}, frozenset({b"x", 1.5})],
    "a dict in its order": {"b": 1, "a": 2, "": 3},
    "keys that differ by type only": {1: "int", "1": "str", (1,): "tuple", None: 0, b"1": 1, 2.5: 2, frozenset({1}): 3},
    "keys that look like tags": [{"$int": "0x1"}, {"a": 1, "$b": 2}, {"\ud800": 1}],
    "an OrderedDict": OrderedDict([("b", 1), (2, OrderedDict())]),
    "a defaultdict": [defaultdict(list, {"a": [1]}), defaultdict(None, {1: 2}), defaultdict(int)],
    "a Counter": Counter({"a": 3, "b": -1}),
    "a deque": [deque([1, 2], 5), deque(), deque(maxlen=0)],
    "NumPy scalars": [np.float32(1.5), np.int64(-3), np.True_, np.uint8(7), np.complex64(1 + 2j)],
    "more NumPy scalars": [
        np.str_("a\0"),
        np.bytes_(b"a\0"),
        np.str_(""),
        np.datetime64("2026-01-02"),
        np.float64("nan"),
    ],
    "ml_dtypes": [np.arange(5).astype(ml_dtypes.bfloat16), ml_dtypes.float8_e4m3fn(1.5), np.ones(3, ml_dtypes.int4)],
    "arrays": [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array(3.5),
        np.zeros((0, 4), np.float16),
        np.array(["ab", ""]),
    ],
    "an array in Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "NumPy's old random state": np.random.RandomState(3).get_state(),
    "NumPy's random state": np.random.PCG64(7).state,
    "another of NumPy's random states": np.random.Philox(7).state,
    "Python's random state": random.Random(5).getstate(),  # noqa: S311  (a state, not a secret)
    "times": [
        datetime(2026, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001  (without a zone on purpose)
        datetime(2026, 1, 2, tzinfo=UTC),
        datetime(2026, 10, 25, 2, 30, fold=1),  # noqa: DTZ001  (the same)
    ],
    "times in zones": [
        datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3, minutes=30), "here")),
        datetime(2026, 1, 2, tzinfo=timezone(timedelta(seconds=1))),
    ],
    "dates and spans": [date(1, 1, 1), timedelta(days=-1, microseconds=7), timedelta.max],
    "a path": [Path("a/../b"), Path(), Path("/ñ")],
    "enums": [Color.BLUE, Color.CRIMSON, Level.LOW, Access.READ],
    "a dataclass": Cursor(3, {1, 2}),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_value_comes_back_with_its_types_its_order_and_its_bits(value):
    assert same(again(value), value)


def test_an_array_that_came_back_can_be_written():
    array = again(np.zeros(3))
    array[0] = 1
    assert array.flags.owndata


def test_rng_states_that_came_back_go_on_as_before():
    generator = np.random.Generator(np.random.PCG64(9))
    generator.random(5)
    other = np.random.Generator(np.random.PCG64(1))
    other.bit_generator.state = again(generator.bit_generator.state)
    assert other.random(9).tolist() == generator.random(9).tolist()


HASHABLE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
ANY = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict),
        st.sets(HASHABLE, max_size=3),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 7)),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(ANY)
def test_whatever_is_stored_comes_back_and_is_spelled_one_way_only(value):
    body = encode_value(value, types=types())
    back = decode_value(body, types=types())
    assert encode_value(back, types=types()) == body
    assert repr(type(back)) == repr(type(value))
    json.loads(body)


def test_a_set_is_sorted_by_how_its_entries_are_spelled():
    body = encode_value({"é", "z", (1, 2), (1,), 10, 9}, types=types())
    assert body.decode() == '{"$set":["z","é",10,9,{"$tuple":[1,2]},{"$tuple":[1]}]}'


def test_equal_sets_are_spelled_alike_whatever_order_they_were_filled_in():
    forwards, backwards = set(), set()
    for number in range(0, 900, 8):
        forwards.add(number)
        backwards.add(896 - number)
    assert encode_value(forwards, types=types()) == encode_value(backwards, types=types())


class Dangerous:
    def __reduce__(self):
        raise AssertionError("nothing is ever pickled")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [0, 1, 2, Dangerous()]}, "state['a'][3] is a "),
        ([OrderedDict(x=(1, object()))], "state[0]['x'][1] is a builtins.object"),
        ({1: {2: lambda: 0}}, "state[1][2] is a builtins.function"),
        ({Color: 1}, "state key <enum 'Color'> is a enum.EnumType"),
        (Cursor(Dangerous()), "state.shard is a "),
        ({"a": Access.READ | Access.WRITE}, "state['a'] is a combination"),
        (defaultdict(lambda: 0), "state is a defaultdict of <function"),
        (np.array([1, "a"], object), "state is a NumPy value of the element type object"),
        (np.zeros(2, [("a", "i4")]), "state is a NumPy value"),
        (np.longdouble(1), "state is a NumPy value"),
        (np.ma.masked_array([1]), "state is a numpy.ma"),
        (bytearray(b"x"), "state is a builtins.bytearray"),
        (True + 1j, "state is a builtins.complex"),
    ],
)
def test_a_value_that_is_not_known_is_refused_with_its_place(value, place):
    with pytest.raises(UnsupportedError) as caught:
        encode_value(value, types=types())
    assert caught.value.message.startswith(place)


def test_a_value_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(UnsupportedError, match="nested deeper than 64, or holds itself"):
        encode_value(loop, types=types())


def test_the_deepest_value_that_is_stored_comes_back():
    value = Cursor(1)
    for _ in range(62):
        value = Cursor(value)
    assert again(value) == value


@pytest.mark.parametrize(
    "value", ["x" * 2000, [0] * 2000, b"x" * 2000, np.zeros(2000), {"k" * 2000: 1}, {1: "ñ" * 800}]
)
def test_a_document_larger_than_allowed_is_refused_both_ways(value):
    with pytest.raises(InvalidInputError, match="more than 1000 bytes"):
        encode_value(value, types=types(), max_bytes=1000)
    with pytest.raises(InvalidInputError, match="more than 1000 bytes"):
        decode_value(encode_value(value, types=types()), types=types(), max_bytes=1000)


BROKEN = [
    b"",
    b"{",
    b"\xff",
    b"NaN",
    b"1e999",
    b'{"a":1,"a":2}',
    b"[" * 5000,
    b"9" * 5000,
    b'{"$int":"12"}',
    b'{"$int":"0x_1"}',
    b'{"$int":5}',
    b'{"$float":"nan"}',
    b'{"$float":"3ff0000000000000"}',
    b'{"$bytes":"!"}',
    b'{"$bytes":null}',
    b'{"$str":"/w=="}',
    b'{"$tuple":{}}',
    b'{"$set":[1,1]}',
    b'{"$set":[[]]}',
    b'{"$dict":[[1,2],[1,3]]}',
    b'{"$dict":[[1]]}',
    b'{"$dict":[[{},1]]}',
    b'{"$dict":3}',
    b'{"$defaultdict":{"factory":"eval","items":[]}}',
    b'{"$defaultdict":[]}',
    b'{"$deque":{"items":[1,2],"maxlen":1}}',
    b'{"$deque":{"items":[1],"maxlen":true}}',
    b'{"a":1,"$b":2}',
    b'{"$int":"0x1","a":2}',
    b'{"$date":"2026-13-01"}',
    b'{"$datetime":{}}',
    b'{"$zoneinfo":"No/Where"}',
    b'{"$timedelta":[1e300,0,0]}',
    b'{"$enum:tests.Color":"GREEN"}',
    b'{"$enum:tests.Color":"__class__"}',
    b'{"$dataclass:tests.Cursor":{"shard":1}}',
    b'{"$dataclass:tests.Cursor":{"shard":1,"seen":2,"note":"","more":1}}',
    b'{"$numpy.array":{"dtype":"<f4","shape":[2],"data":{"$bytes":"AAAA"}}}',
    b'{"$numpy.array":{"dtype":"|O","shape":[],"data":{"$bytes":""}}}',
    b'{"$numpy.array":{"dtype":"<f4","shape":[-1,-1],"data":{"$bytes":"AAAAAA=="}}}',
    b'{"$numpy.array":{"dtype":"generic","shape":[0],"data":{"$bytes":""}}}',
]


@pytest.mark.parametrize("body", BROKEN)
def test_a_broken_document_is_refused(body):
    with pytest.raises(IntegrityError):
        decode_value(body, types=types())


def test_a_document_nested_too_deeply_is_refused():
    with pytest.raises(IntegrityError, match="nested too deeply"):
        decode_value(b"[" * 400 + b"]" * 400, types=types())


def test_a_tag_that_nobody_registered_is_refused_by_name():
    body = encode_value({"a": Color.RED}, types=types())
    with pytest.raises(UnsupportedError, match=r"state\['a'\] was stored as 'enum:tests.Color'"):
        decode_value(body, types=standard_types())


def test_a_tag_or_type_cannot_be_registered_twice():
    known = types()
    with pytest.raises(InvalidInputError):
        known.register_enum(Color, "tests.Other")
    with pytest.raises(InvalidInputError):
        known.register("int", Dangerous, encode=str, decode=str)
    with pytest.raises(InvalidInputError):
        known.register_dataclass(Dangerous, "tests.Dangerous")


def test_an_array_that_is_too_large_is_refused_before_it_is_copied():
    array = np.zeros(200_000_000, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=r"state\['a'\] takes more than"):
            encode_value({"a": array}, types=types())
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
