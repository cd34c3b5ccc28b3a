"""From a URL to a store. Only the engine that is asked for is imported.

A URL is taken literally: nothing is decoded, globbed or expanded. A run called `run[lr=1e-4]` or `p%20q` is just that.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ckptstore.errors import InvalidInputError, UnsupportedError
from ckptstore.nearest import meant
from ckptstore.objectstore import web_urls
from ckptstore.objectstore.keys import fault_of_segments
from ckptstore.objectstore.memory import MemoryStore
from ckptstore.objectstore.port import ObjectStore
from ckptstore.objectstore.wrappers.retrying import RetryingStore
from ckptstore.options import TransferOptions, check_kinds

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HALF_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_CLOUDS = {"s3": "bucket", "gs": "bucket", "az": "container"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class _Place:
    """A URL taken apart: the scheme, and what follows `://` without its trailing slash."""

    scheme: str
    path: str
    options: dict[str, object]
    transfer: TransferOptions

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.path}"


def open_store(
    url: str | os.PathLike[str],
    *,
    engine: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    transfer: TransferOptions | None = None,
) -> ObjectStore:
    """Return the store at `url`, the root of a run. Nothing is created, and nothing is sent.

    Args:
        url: A path, or `file://`, `memory://`, `s3://`, `gs://`, `az://`, or what fsspec knows. A plain path may begin
            with `.` or `..`, which mean what they mean in a shell; apart from that nothing in it is interpreted.
        engine: What moves the bytes; by default the first one known for the scheme.
        storage_options: The engine's own settings, by the usual names. Names that it does not know are refused.
        transfer: How large objects are moved.

    Raises:
        InvalidInputError: The URL has an unknown scheme, no bucket, or a path that is not in plain form; it is an
            address of the web; the root is a file; an option is not known.
        UnsupportedError: The engine's package is not installed.
    """
    scheme, path = _split(url)
    engines = _ENGINES.get(scheme, _ANY)
    if engine is not None and engine not in engines:
        raise InvalidInputError(
            f"The engine {engine!r} does not serve {scheme}://.{meant(str(engine), engines)}",
            hint=f"It is served by: {', '.join(engines)}.",
        )
    check_kinds(storage_options=(storage_options, Mapping), transfer=(transfer, TransferOptions))
    place = _Place(scheme, path, dict(storage_options or {}), transfer or TransferOptions())
    engine = engine or next(iter(engines))
    store = engines[engine](place)
    return store if engine in _AT_HAND else RetryingStore(store, options=place.transfer.retry)


def _split(url: str | os.PathLike[str]) -> tuple[str, str]:
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise InvalidInputError(f"A run's root must be a path or a URL, not {url!r:.80}.", hint=_known())
    match = _SCHEME.fullmatch(text) if isinstance(url, str) else None
    if match is None:
        return "file", _plain_path(text)
    scheme, path = match[1].lower(), match[2]
    if scheme in _ALSO_CALLED:
        raise InvalidInputError(
            f"{scheme}:// is called {_ALSO_CALLED[scheme]}:// here.",
            hint=f"Write {_ALSO_CALLED[scheme]}://: one run must not have two names.",
        )
    if scheme in web_urls.SCHEMES:
        raise web_urls.refusal(scheme, path)
    if scheme == "file":
        if not path.startswith("/"):
            raise InvalidInputError("A file:// URL needs an absolute path.", hint="Write file:///path/to/run.")
        return scheme, "/" + _checked(path[1:], below="/")
    if scheme in _CLOUDS and not _BUCKET.fullmatch(path.split("/")[0]):
        # The name is not shown: it could hold credentials (`s3://key:secret@bucket`).
        raise InvalidInputError(
            f"What follows {scheme}:// first is no {_CLOUDS[scheme]}'s name: 3 to 255 letters, digits, `.`, `-`, `_`.",
            hint=f"Write {scheme}://{_CLOUDS[scheme]}/path/to/run; credentials do not belong in a URL.",
        )
    return scheme, _checked(path)


def _plain_path(text: str) -> str:
    first = text.split("/", 1)[0]
    if _HALF_SCHEME.fullmatch(first):  # `s3:/bucket` would become a directory called `s3:` here
        raise InvalidInputError(
            f"What begins with {first!r:.40} is neither a path nor a URL.",  # the rest could hold credentials
            hint=f"Write {first}// and what follows, or ./{first} if a path is meant.",
        )
    if text.startswith("/"):
        return "/" + _checked(text[1:], below="/")
    up, rest = os.getcwd(), text  # noqa: PTH109  (a string, taken as it is)
    while rest.split("/")[0] in (".", ".."):
        step, _, rest = rest.partition("/")
        up = os.path.dirname(up) if step == ".." else up  # noqa: PTH120  (as above)
    rest = _checked(rest) if rest else ""
    return f"{up.rstrip('/')}/{rest}".rstrip("/") or "/"


def _checked(path: str, *, below: str = "") -> str:
    path = path.removesuffix("/")
    fault = fault_of_segments(path) if path else None
    if fault is not None:
        shown = below + path.rpartition("@")[2]  # without a user and a password
        raise InvalidInputError(f"The path {shown!r} cannot be a run's root: {fault}.", hint=_known(), path=shown)
    return path


def _known() -> str:
    return f"Known are plain paths, {', '.join(f'{scheme}://' for scheme in _ENGINES)}, and what fsspec knows."


def _refuse_options(place: _Place) -> None:
    if place.options:
        raise InvalidInputError(
            f"{place.scheme}:// takes no storage_options, not {', '.join(sorted(place.options))}.",
            hint="Leave them out.",
        )


_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def _open_memory(place: _Place) -> ObjectStore:
    _refuse_options(place)
    if not place.path:
        raise InvalidInputError("A memory:// URL needs a name.", hint="Write memory://name.")
    with _memory_lock:
        return _memory.setdefault(place.path, MemoryStore(place.url))


def _open_local(place: _Place) -> ObjectStore:
    from ckptstore.objectstore.local import LocalStore  # noqa: PLC0415  (only the engine asked for)

    _refuse_options(place)
    return LocalStore(place.path)


def _open_obstore(place: _Place) -> ObjectStore:
    with _needing(place, "azure" if place.scheme == "az" else "s3"):
        from ckptstore.objectstore.via_obstore import open_azure, open_gcs, open_s3  # noqa: PLC0415  (only if asked for)
    openers = {"s3": open_s3, "az": open_azure, "gs": open_gcs}
    return openers[place.scheme](*_bucket_of(place), options=place.options, transfer=place.transfer)


def _open_s3fs(place: _Place) -> ObjectStore:
    with _needing(place, "s3fs"):
        from ckptstore.objectstore.via_s3fs import S3fsStore  # noqa: PLC0415  (only the engine asked for)
    return S3fsStore(*_bucket_of(place), options=place.options, transfer=place.transfer)


def _open_gcsfs(place: _Place) -> ObjectStore:
    with _needing(place, "gcs"):
        from ckptstore.objectstore.via_gcsfs import GcsfsStore  # noqa: PLC0415  (only the engine asked for)
    return GcsfsStore(*_bucket_of(place), options=place.options, transfer=place.transfer)


def _open_fsspec(place: _Place) -> ObjectStore:
    with _needing(place, "fsspec"):
        from ckptstore.objectstore.via_fsspec import FsspecStore  # noqa: PLC0415  (only the engine asked for)
    return FsspecStore(place.scheme, place.path, options=place.options, transfer=place.transfer)


@contextlib.contextmanager
def _needing(place: _Place, extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{place.scheme}:// needs the package {error.name} for this engine.",
            hint=f"Run: pip install 'ckptstore[{extra}]'.",
        ) from error


def _bucket_of(place: _Place) -> tuple[str, str]:
    bucket, _, prefix = place.path.partition("/")
    if "\\" in prefix:
        # Some servers take it for a slash: two runs could meet.
        raise InvalidInputError(f"A URL of {place.scheme}:// cannot hold a backslash.", hint="Use another name.")
    return bucket, prefix


_AT_HAND = ("local", "memory")
"""Engines with no network between: what they refuse, they refuse again."""

_ENGINES: dict[str, dict[str, Callable[[_Place], ObjectStore]]] = {
    "file": {"local": _open_local, "fsspec": _open_fsspec},
    "memory": {"memory": _open_memory, "fsspec": _open_fsspec},
    "s3": {"obstore": _open_obstore, "s3fs": _open_s3fs},
    "gs": {"gcsfs": _open_gcsfs, "obstore": _open_obstore},
    "az": {"obstore": _open_obstore, "fsspec": _open_fsspec},
}
_ANY = {"fsspec": _open_fsspec}
_ALSO_CALLED = {"gcs": "gs", "s3a": "s3", "local": "file"}
