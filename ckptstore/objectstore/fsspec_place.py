"""One of fsspec's file systems, made for us alone, and what must be known of its kind."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.nearest import meant

# Where a file needs a directory. Elsewhere making one could make a bucket.
_WITH_DIRECTORIES = ("file", "local", "sftp", "ssh", "smb", "ftp", "hdfs", "arrow_hdfs", "webhdfs", "webHDFS", "dbfs")
_OURS = ("skip_instance_cache", "use_listings_cache", "asynchronous", "loop")
_AUTHORITY = re.compile(r"(?P<name>[^/:@]*):(?P<secret>[^/]*)@(?P<place>[^/@]*)(?P<rest>/.*)?")
_CUT_PASSWORD = re.compile(r"[^/:@]*:(?!\d*/)[^/@]*/.*@.*")

# fsspec's `memory` looks and then writes, and stumbles when its dictionary changes while it walks. That dictionary is
# this process's, and so one lock of this process makes each of its calls one step.
_memory_lock = threading.RLock()


class FsspecPlace:
    """A file system and a root in it.

    Args:
        protocol: fsspec's name for the kind of file system.
        root: What follows `://` in a URL.
        options: For the file system's class.

    Raises:
        InvalidInputError: The protocol is not known, or the options do not fit it.
        UnsupportedError: Its package is not installed; or it reads from a cache.
    """

    def __init__(self, protocol: str, root: str, options: Mapping[str, Any]) -> None:
        url, kind = f"{protocol}://{root}", checked_kind(protocol, options)
        with _sensible(protocol):
            of_url = kind._get_kwargs_from_urls(url)  # noqa: SLF001  (fsspec's own way to read a URL)
            self.root: str = kind._strip_protocol(url).rstrip("/")  # noqa: SLF001  (the same)
            given = {name: value for name, value in of_url.items() if value is not None} | dict(options)
            if kind is LocalFileSystem:
                given = {"auto_mkdir": True, **given}
            self.fs = _made(kind, given)
        if isinstance(_innermost(self.fs), CachingFileSystem):
            raise _caches(protocol)
        self.innermost = _innermost(self.fs)
        # One client of these serves one thread at a time: two that wait for its answers take each other's.
        self._turn = contextlib.nullcontext() if _is_async(self.innermost) else threading.RLock()
        self._refreshes = _takes(self.fs, "ls", "refresh")

    @property
    def creates(self) -> bool:
        """Whether the file system claims that it can create a file only if it is absent.

        fsspec's own way, which every file system has that knows no better, looks and then writes.
        """
        fs = self.innermost
        own = AsyncFileSystem._pipe_file if _is_async(fs) else AbstractFileSystem.pipe_file  # noqa: SLF001  (asked for, not called)
        return getattr(type(fs), own.__name__) is not own and _names(fs, "pipe_file", "mode")

    @property
    def needs_directories(self) -> bool:
        """Whether a file needs a directory that must be made first."""
        protocols = self.innermost.protocol
        return any(name in _WITH_DIRECTORIES for name in ([protocols] if isinstance(protocols, str) else protocols))

    @property
    def is_memory(self) -> bool:
        """Whether it is fsspec's `memory`."""
        return isinstance(self.innermost, MemoryFileSystem)

    def turn(self, *, races: bool = False) -> contextlib.AbstractContextManager[object]:
        """Return what is held during a call; `races`: it is a create, which must hold out against others anyway."""
        if self.is_memory:
            return _memory_lock
        return contextlib.nullcontext() if races else self._turn

    def forget(self) -> None:
        """Let the file system forget what it remembers of listings."""
        self.fs.invalidate_cache()

    def entries(self, path: str) -> list[dict[str, Any]]:
        """Return what stands in the directory `path`, from no cache."""
        self.forget()
        fresh = {"refresh": True} if self._refreshes else {}
        return list(self.fs.ls(path, detail=True, **fresh))


def public_url(protocol: str, root: str) -> str:
    """Return a URL without the password that may stand in it: what follows the first colon, up to the last `@`.

    What stands before an `@` without a colon is no secret: a container, or a user. It stays, as a user's name does:
    another one may be another place, and one place must not have the URL of another.

    Raises:
        InvalidInputError: There may be a password that holds a slash. It is not shown.
    """
    if protocol in ("http", "https") and "?" in root:
        raise InvalidInputError(  # not shown: it may be signed
            f"A query cannot be a part of a run's root: keys follow it. (It began with {protocol}://.)",
            hint="Leave it out, and say who you are in storage_options.",
        )
    if _CUT_PASSWORD.fullmatch(root):
        raise InvalidInputError(
            f"The user and the password of this {protocol}:// URL cannot be told from its path.",
            hint="Give them in storage_options: {'username': …, 'password': …}.",
        )
    match = _AUTHORITY.fullmatch(root)
    public = f"{match['name']}@{match['place']}{match['rest'] or ''}" if match else root
    return f"{protocol}://{public}".rstrip("/")


def checked_kind(protocol: str, options: Mapping[str, Any]) -> Any:
    """Return fsspec's class for `protocol`, if it can be used with `options` as far as can be told without using it.

    Raises:
        InvalidInputError: The protocol is not known; or what is ours to say was said.
        UnsupportedError: Its package is not installed; or it reads from a cache.
    """
    if "::" in protocol:
        raise UnsupportedError(
            f"{protocol}:// is a chain of file systems.", hint="Name the last one, which has the data."
        )
    ours = sorted(set(_OURS).intersection(options))
    if ours:
        raise InvalidInputError(
            f"{', '.join(ours)} cannot be set.",
            hint="Leave it out: nothing is shared, and nothing is read from a cache.",
        )
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise UnsupportedError(
            f"fsspec's {protocol}:// needs a package that is not installed.",
            hint="Install it; `fsspec.registry.known_implementations` names it.",
        ) from error
    except ValueError as error:
        raise InvalidInputError(
            f"fsspec knows no {protocol}://.{meant(protocol, fsspec.available_protocols())}",
            hint="Correct the URL: file://, s3://, gs://, az:// and memory:// are known, and what fsspec knows.",
            scheme=protocol,
        ) from error
    if issubclass(kind, CachingFileSystem):
        raise _caches(protocol)
    return kind


def _made(kind: Any, given: Mapping[str, Any]) -> Any:
    try:
        return kind(**given, use_listings_cache=False, skip_instance_cache=True)
    except TypeError:  # it hands all that it is given to another client, which does not know this name
        return kind(**given, skip_instance_cache=True)


def _innermost(fs: Any) -> Any:
    while isinstance(fs, DirFileSystem):
        fs = fs.fs
    return fs


@contextlib.contextmanager
def _sensible(protocol: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, LookupError) as error:
        raise InvalidInputError(
            f"fsspec's {protocol}:// cannot be made of this URL and these options ({type(error).__name__}).",
            hint="See the documentation of its class for what it takes.",
        ) from None  # its text may hold a secret


def _caches(protocol: str) -> UnsupportedError:
    return UnsupportedError(
        f"{protocol}:// reads from a cache: what others write would not be seen.",
        hint="Name the file system behind it.",
    )


def _takes(fs: Any, name: str, parameter: str) -> bool:
    """Return whether a method takes a parameter, by its name or among others."""
    return any(one.kind is one.VAR_KEYWORD or one.name == parameter for one in _parameters(fs, name))


def _names(fs: Any, name: str, parameter: str) -> bool:
    """Return whether a method knows a parameter by its name; among others it would be swallowed."""
    return any(one.name == parameter for one in _parameters(fs, name))


def _parameters(fs: Any, name: str) -> list[inspect.Parameter]:
    method = getattr(fs, f"_{name}" if _is_async(fs) else name)
    return list(inspect.signature(method).parameters.values())


def _is_async(fs: Any) -> bool:
    return isinstance(fs, AsyncFileSystem)
