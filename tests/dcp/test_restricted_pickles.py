"""Each attack runs in a process of its own, which is given little memory and time: a crash or a bomb is a failure."""

import collections
import datetime as dt
import io
import os
import pathlib
import pickle
import resource
import zipfile
from functools import partial

import numpy as np
import pytest
import torch
from forks import end_after

import storage_writers as sw
from ckptstore.errors import UnsafePickleError
from storage_writers import pickles

ROOM, SECONDS = 1 << 30, 120  # of memory more than there is now; each bomb asks for more, and of time for ever


class Call:
    """Pickles as a call of `function` with `args`, and then of `__setstate__`."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args, state) if state is not None else (function, args)

    def __reduce__(self):
        return self.reduced


def archive(body, *, compress=zipfile.ZIP_STORED, **records):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compress) as sink:
        for name, data in {"data.pkl": body, "byteorder": b"little", "version": b"3\n", **records}.items():
            sink.writestr(f"archive/{name}", data)
    return stream.getvalue()


def pickled(value, protocol=2):
    return archive(pickle.dumps(value, protocol=protocol))


def tensor(*, numel=2, offset=0, size=(2,), stride=(1,), hooks=None):
    """Return a pickle of a tensor over eight bytes, as torch writes it but with other numbers."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, each):
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if each == "the storage" else None

    stream, hooks = io.BytesIO(), collections.OrderedDict() if hooks is None else hooks
    call = Call(torch._utils._rebuild_tensor_v2, "the storage", offset, size, stride, False, hooks)  # noqa: FBT003  (as torch writes it)
    Pickler(stream, protocol=2).dump(call)
    return archive(stream.getvalue(), **{"data/0": bytes(8)})


scalar = np.int8(0).__reduce__()[0]
reconstruct = np.zeros(1).__reduce__()[0]
pointer = (0x4141414141414141).to_bytes(8, "little")
OBJECTS = np.dtype([("a", "O")])
PAIR = np.dtype(("O", (1,)))


def array(dtype, raw=pointer, shape=(1,), *, kind=np.ndarray):
    return Call(reconstruct, kind, (0,), b"b", state=(1, shape, dtype, False, raw))


def doubled(then):
    """Return a pickle that hashes a tuple of two of a tuple of two and so on, 60 deep."""
    steps = b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))
    return archive(b"\x80\x04" + then.replace(b"?", b")" + steps))


def generator(make, **changes):
    bits = make(1)
    function, args, state = bits.__reduce__()
    inner = state[0]
    for name, value in changes.items():
        (inner["state"] if name in inner["state"] else inner)[name] = value
    return Call(function, *args, state=state)


def legacy(pos):
    function, args, state = np.random.RandomState(1).__reduce__()
    state["state"]["pos"] = pos
    return Call(function, *args, state=state)


def sparse(indices, size=(2, 2)):
    stream = io.BytesIO()
    good = torch.sparse_coo_tensor(torch.tensor(indices), torch.ones(1), (10**6, 10**6))
    good = torch.sparse_coo_tensor(good._indices(), good._values(), size, check_invariants=False)
    torch.save([good], stream)
    return stream.getvalue()


def deep_defaultdicts(times=200_000):  # twice what ends a process that only loads and drops them
    one = b"ccollections\ndefaultdict\n)R"
    return archive(
        b"\x80\x02" + one + b"q\x00" + (b"K\x00" + b"ccollections\ndefaultdict\n)R") * times + b"s" * times + b"."
    )


ATTACKS = {
    "an array over pointers": lambda: pickled(Call(np.ndarray, (1,), np.dtype("O"), bytearray(pointer))),
    "an array of objects": lambda: pickled(array(np.dtype("O"))),
    "an array of an object in a field": lambda: pickled(array(OBJECTS)),
    "an array of an object in a subarray": lambda: pickled(array(PAIR)),
    "a scalar of an object in a field": lambda: pickled(Call(scalar, np.dtype("V8"), pointer)),
    "a scalar whose dtype has an object": lambda: pickled(Call(scalar, OBJECTS, pointer)),
    "a scalar shorter than its dtype": lambda: pickled(Call(scalar, np.dtype("U1000000"), b"")),
    "an array of fewer bytes than its shape": lambda: pickled(array(np.dtype("i8"), bytes(8), (1000,))),
    "an array of nothings": lambda: pickled(array(np.dtype("S0"), b"", (10**15,))),
    "an array of a huge shape": lambda: pickled(Call(np.ndarray, (1 << 33,))),
    "text that is no text": lambda: pickled(array(np.dtype("U1"), b"\xff\xff\xff\xff")),
    "a dtype with flags of another": lambda: pickled(
        Call(np.dtype, "i8", False, True, state=(3, "<", None, None, None, -1, -1, 63))  # noqa: FBT003  (as numpy writes it)
    ),
    "a dtype that is told it has fields": lambda: pickled(
        Call(np.dtype, "i8", False, True, state=(3, "<", None, ("a",), {"a": (np.dtype("i8"), 0)}, 8, 1, 16))  # noqa: FBT003  (as numpy writes it)
    ),
    "a large bytearray": lambda: pickled(Call(bytearray, 8 << 30)),
    "large bytes": lambda: pickled(Call(bytes, 8 << 30)),
    "a large bytearray of protocol 5": lambda: archive(b"\x80\x05\x96" + (8 << 30).to_bytes(8, "little") + b"."),
    "a list of a range": lambda: pickled(Call(list, range(10**12))),
    "a tuple of a range": lambda: pickled(Call(tuple, range(10**12))),
    "a set of a range": lambda: pickled(Call(set, range(10**12))),
    "a deque of a range": lambda: pickled(Call(collections.deque, range(10**13), 1)),
    "a counter of a range": lambda: pickled(Call(collections.Counter, range(10**12))),
    "a storage": lambda: pickled(Call(torch.UntypedStorage, 8 << 30)),
    "a large number from text": lambda: pickled(Call(int, "9" * 4000)),
    "a key that takes forever to hash": lambda: doubled(b"}?Ns."),
    "a set of what takes forever to hash": lambda: doubled(b"\x8f(?\x90."),
    "lists in lists": lambda: archive(b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b"."),
    "defaultdicts in defaultdicts": deep_defaultdicts,
    "slices in slices": lambda: archive(b"\x80\x03" + b"cbuiltins\nslice\n" * 9 + b"N" + b"NN\x87R" * 9 + b"."),
    "a position behind the state": lambda: pickled(generator(np.random.MT19937, pos=1 << 20)),
    "a position before the state": lambda: pickled(generator(np.random.MT19937, pos=-(1 << 20))),
    "a position before the buffer": lambda: pickled(generator(np.random.Philox, buffer_pos=-(1 << 20))),
    "a position behind the legacy state": lambda: pickled(legacy(1 << 20)),
    "a seed with another pool": lambda: pickled(
        Call(
            *np.random.SeedSequence(1).__reduce__()[:1],
            *np.random.SeedSequence(1).__reduce__()[1],
            state=(1, 0, np.zeros(1, "u4"), 1 << 20, ()),
        )
    ),
    "a storage larger than its record": lambda: tensor(numel=1 << 20, size=(1 << 20,)),
    "a tensor larger than its storage": lambda: tensor(size=(1 << 20,)),
    "a tensor behind its storage": lambda: tensor(offset=1 << 20),
    "a tensor with steps out of its storage": lambda: tensor(stride=(1 << 20,)),
    "a tensor with steps back": lambda: tensor(stride=(-(1 << 20),)),
    "a sparse tensor with indices outside": lambda: sparse([[999_999], [0]]),
    "a compressed record": lambda: archive(pickle.dumps(b"x" * (1 << 24)), compress=zipfile.ZIP_DEFLATED),
    "an instance of a class": lambda: archive(b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85\x81."),
    "an instance of protocol 0": lambda: archive(b"(I2000000000\nibuiltins\nbytearray\n."),
    "a class of storages as a value": lambda: pickled([torch.FloatStorage]),
    "a date that is none": lambda: pickled(Call(dt.date, b"\x07\xea\x01\xff")),
}


def refused(data):
    """Return whether both ways to read `data` refuse it."""
    for read in (pickles.restricted_load, partial(pickles.remade, pickled=False, allow_pickle=False)):
        try:
            read(data, key="job.v")
        except UnsafePickleError as error:
            answer = "job.v" in str(error)
        else:
            answer = False
    return answer


def status(data):
    """Return how a process of its own ends that is to have `data` refused; 0 if it was."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            end_after(SECONDS)
            code = 0 if refused(data) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ATTACKS)
def test_what_no_plain_value_has_in_it_is_refused_without_harm(name):
    assert status(ATTACKS[name]()) == 0


PLAIN = {
    **{f"array of {code}": partial(np.ones, (2, 3), code) for code in ("?", "i1", "u2", "f2", "f8", "c16", "U3", "S2")},
    "dates": lambda: np.array(["2026-01-01"], "M8[25s]"),
    "spans": lambda: np.array([5], "m8[D]"),
    "an empty array": lambda: np.zeros((0, 3)),
    "an array of no dimensions": lambda: np.array(1.5),
    "an array of columns": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "a number of numpy": lambda: np.float32(0.5),
    "a deque": lambda: collections.deque([1, 2], 3),
    "a defaultdict": lambda: collections.defaultdict(list, a=[collections.defaultdict(None)]),
    "a counter": lambda: collections.Counter("aab"),
    "an ordered dict": lambda: collections.OrderedDict(b=1, a=2),
    "sets": lambda: [{1, (2, 3)}, frozenset({b"", "x"}), set()],
    "bytes": lambda: [b"", b"\xff", bytearray(), bytearray(b"\xff")],
    "numbers": lambda: [1j, 2**5000, -(2**70), range(1, 9, 3), slice(None, 1)],
    "times": lambda: [
        dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=1), "x")),
        dt.date(2026, 1, 2),
        dt.time(1),
    ],
    "a path": lambda: pathlib.PurePosixPath("/a/b"),
    "of torch": lambda: [torch.Size([1, 2]), torch.device("cuda", 1), torch.bfloat16],
    "tensors": lambda: [
        torch.ones(2).expand(3, 2),
        torch.ones(2, dtype=torch.uint16),
        torch.zeros(0),
        torch.ones(2, 2).to_sparse(),
    ],
    **{name: partial(getattr(np.random, name), 5) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")},
    "a generator": lambda: np.random.Generator(np.random.Philox(5)),
    "a legacy generator": lambda: np.random.RandomState(5),
    "a seed": lambda: np.random.SeedSequence([1, 2], spawn_key=(3,)),
}


def written(value, protocol):
    stream = io.BytesIO()
    torch.save(value, stream, pickle_protocol=protocol)
    return stream.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_value_comes_back_from_each_protocol(name, protocol):
    data = written(PLAIN[name](), protocol)
    back = pickles.restricted_load(data, key="v")
    assert type(back) is type(PLAIN[name]())
    assert written(back, 4) == written(pickles.restricted_load(written(back, 4), key="v"), 4)
    assert repr(back) == repr(PLAIN[name]()) or "random" in type(back).__module__
    if isinstance(back, np.random.RandomState):
        assert back.random() == PLAIN[name]().random()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_numbers_of_the_other_byte_order_come_back(protocol):
    """As equal numbers; numpy turns them into the order of the machine when it reads them."""
    back = pickles.restricted_load(written(np.arange(3, dtype=">i4"), protocol), key="v")
    assert back.tolist() == [0, 1, 2]


def test_a_structured_array_is_refused_before_it_is_saved(tmp_path):
    with pytest.raises(UnsafePickleError, match="numpy dtype"):
        sw.save({"v": np.zeros(2, "i4,f4")}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(tmp_path / "run"))


def test_a_load_of_a_crafted_value_is_refused(tmp_path, monkeypatch):
    crafted = ATTACKS["an array of objects"]()
    monkeypatch.setattr(pickles, "check", lambda *_, **__: False)
    monkeypatch.setattr(pickles, "saved_bytes", lambda *_, **__: crafted)
    sw.save({"v": (1,)}, checkpoint_id="a", storage_writer=sw.CkptStoreWriter(tmp_path / "run"))
    with pytest.raises(UnsafePickleError, match="v"):
        sw.load({"v": None}, storage_reader=sw.CkptStoreReader(tmp_path / "run"))
