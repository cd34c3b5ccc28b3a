"""The only reader of stored pickles: an archive that `torch.save` writes, unpickled from three closed tables.

The archive is taken apart here rather than by `torch.load`, which believes the length that a pickle gives for a storage
and reads on behind its end, and which makes room for what a record says it unpacks to.
"""

from __future__ import annotations

import _compat_pickle
import collections
import io
import pickle
import sys
import zipfile
from typing import Any

import torch
from torch import storage as torch_storage

from storage_writers import harmless, harmless_numpy
from storage_writers.harmless_numpy import ints, want

_DEEPEST = 50  # defaultdicts in each other: freeing a long chain of them overflows the stack of the process
_TypedStorage: Any = torch_storage.TypedStorage  # torch gives these two no types
_UntypedStorage: Any = torch.UntypedStorage
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_Python: Any = pickle._Unpickler  # noqa: SLF001  (the one written in Python: only there can an opcode be refused)


def load(data: bytes | memoryview) -> Any:
    """Return the value in `data`, with its tensors on the CPU.

    Raises:
        Exception: Any: it is not what `torch.save` writes, or is not built of what is harmless.
    """
    archive = _Archive(data)
    return _Restricted(archive).load()


class _Archive:
    """The records of what `torch.save` wrote; together they are no larger than the archive."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        records = self._zip.infolist()
        for record in records:
            plain = record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size
            want(plain, "a compressed record")
        want(sum(record.file_size for record in records) <= len(data), "an archive that unpacks to more than it is")
        self._records = {record.filename.partition("/")[2]: record for record in records}
        want(len(self._records) == len(records), "an archive with records of the same name")
        want("constants.pkl" not in self._records, "a TorchScript archive")
        order = self.read("byteorder") if "byteorder" in self._records else b"little"
        want(order in (b"little", b"big"), "the byte order")
        self._swapped = order != sys.byteorder.encode()
        self._storages: dict[str, Any] = {}

    def read(self, name: str) -> bytes:
        """Return a record. Its CRC is not compared: torch can be told to write none, and our own hashes say more."""
        want(name in self._records, "a record that is missing")
        record = self._records[name]
        record.CRC = None  # type: ignore[assignment]
        return self._zip.read(record)

    def storage(self, saved: Any) -> Any:
        """Return the storage that a persistent id names; the same each time."""
        want(type(saved) is tuple and len(saved) == 5 and saved[0] == "storage", "a storage")  # noqa: PLR2004
        _, kind, key, location, count = saved
        want(type(kind) is harmless.StorageKind and type(key) is str and type(location) is str, "a storage")
        if key not in self._storages:
            raw = bytearray(self.read(f"data/{key}"))
            want(ints((count,)) and count * kind.dtype.itemsize <= len(raw), "a storage larger than its record")
            del raw[count * kind.dtype.itemsize :]
            bare: Any = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage() if raw else _UntypedStorage(0)
            if self._swapped:
                bare.byteswap(kind.dtype)
            self._storages[key] = _TypedStorage(wrap_storage=bare, dtype=kind.dtype, _internal=True)
        return self._storages[key]


class _Restricted(_Python):  # type: ignore[misc]
    """Builds what is on the list and nothing else."""

    dispatch = _Python.dispatch.copy()

    def __init__(self, archive: _Archive) -> None:
        super().__init__(io.BytesIO(archive.read("data.pkl")))
        self._archive = archive
        self._depths: dict[int, tuple[Any, int]] = {}  # of the defaultdicts in others, which are kept for their ids
        self._filled: dict[int, tuple[Any, int]] = {}

    def persistent_load(self, pid: Any) -> Any:
        """Return a storage of the archive."""
        return self._archive.storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        """Return the allowed object called `name`, refusing any other."""
        if self.proto < 3:  # noqa: PLR2004  (where pickle says `__builtin__` for `builtins`)
            module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
            module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        try:
            return harmless.NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not on the list of harmless types") from None

    def load_reduce(self) -> None:
        """Call what the table has for it, which checks the arguments."""
        args, called = self.stack.pop(), self.stack[-1]
        call = harmless.CALLS.get(called) if callable(called) else None
        if call is None or type(args) is not tuple:
            name = getattr(called, "__name__", type(called).__name__)
            raise pickle.UnpicklingError(f"{name} is not one of the types that may be called")
        self.stack[-1] = call(*args)

    def load_build(self) -> None:
        """Set the state of what numpy made. Classes and functions are shared by the process and stay as they are."""
        state, built = self.stack.pop(), self.stack[-1]
        for kinds, build in harmless_numpy.BUILDS:
            if isinstance(built, kinds):
                return build(built, state)
        name = getattr(built, "__name__", type(built).__name__)
        raise pickle.UnpicklingError(f"{name} cannot be changed")

    def load_setitems(self) -> None:
        """Put pairs into a mapping, and only into one."""
        pairs = self.pop_mark()
        self._fill(self.stack[-1], pairs)

    def load_setitem(self) -> None:
        """Put one pair into a mapping."""
        pair = [self.stack[-2], self.stack[-1]]
        del self.stack[-2:]
        self._fill(self.stack[-1], pair)

    def load_dict(self) -> None:
        """Make a dict of pairs."""
        pairs, made = self.pop_mark(), dict[Any, Any]()
        self._fill(made, pairs)
        self.append(made)

    def _fill(self, mapping: Any, pairs: list[Any]) -> None:
        want(type(mapping) in _MAPPINGS and len(pairs) % 2 == 0, "a mapping")
        harmless.check_keys(pairs[::2])
        if type(mapping) is collections.defaultdict:
            self._nest(mapping, pairs[1::2])
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            mapping[key] = value

    def _nest(self, outer: Any, values: list[Any]) -> None:
        """Count how deep defaultdicts lie in each other; one that lies in another is complete, as pickle has it."""
        want(id(outer) not in self._depths, "a defaultdict that is changed after it was used")
        deep = self._filled.get(id(outer), (outer, 1))[1]
        for value in values:
            if type(value) is collections.defaultdict:
                inside = self._filled.get(id(value), (value, 1))[1]
                self._depths[id(value)] = (value, inside)
                deep = max(deep, inside + 1)
        want(deep <= _DEEPEST, "a defaultdict in so many others")
        self._filled[id(outer)] = (outer, deep)

    def load_appends(self) -> None:
        """Put items into a list or deque, and only into one."""
        items = self.pop_mark()
        want(type(self.stack[-1]) in (list, collections.deque), "a list")
        self.stack[-1].extend(items)

    def load_append(self) -> None:
        """Put one item into a list or deque."""
        item = self.stack.pop()
        want(type(self.stack[-1]) in (list, collections.deque), "a list")
        self.stack[-1].append(item)

    def load_additems(self) -> None:
        """Put items into a set, and only into one."""
        items = self.pop_mark()
        want(type(self.stack[-1]) is set, "a set")
        harmless.check_keys(items)
        self.stack[-1].update(items)

    def load_frozenset(self) -> None:
        """Make a frozenset."""
        items = self.pop_mark()
        harmless.check_keys(items)
        self.append(frozenset(items))

    def load_bytearray8(self) -> None:
        """Make a bytearray of what is there, not of the length that is claimed."""
        size = int.from_bytes(self.read(8), "little")
        raw = self.read(size) if size <= sys.maxsize else b""
        want(len(raw) == size, "a bytearray")
        self.append(bytearray(raw))

    def refuse(self) -> None:
        """Refuse what no pickle of a harmless value has in it."""
        raise pickle.UnpicklingError("it makes instances of classes, or uses extensions or outside buffers")

    dispatch |= {
        code[0]: step
        for code, step in (
            *((pickle.REDUCE, load_reduce), (pickle.BUILD, load_build), (pickle.DICT, load_dict)),
            *((pickle.SETITEM, load_setitem), (pickle.SETITEMS, load_setitems), (pickle.ADDITEMS, load_additems)),
            *((pickle.APPEND, load_append), (pickle.APPENDS, load_appends), (pickle.FROZENSET, load_frozenset)),
            *((pickle.BYTEARRAY8, load_bytearray8), (pickle.NEWOBJ, refuse), (pickle.NEWOBJ_EX, refuse)),
            *((pickle.INST, refuse), (pickle.OBJ, refuse), (pickle.EXT1, refuse), (pickle.EXT2, refuse)),
            *((pickle.EXT4, refuse), (pickle.NEXT_BUFFER, refuse), (pickle.READONLY_BUFFER, refuse)),
        )
    }
