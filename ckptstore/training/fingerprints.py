"""Fingerprints: a digest of what a run is made of, and the document that says what differs when two digests do."""

from __future__ import annotations

import hashlib
import os
import re
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from blake3 import blake3

from ckptstore.errors import IntegrityError, InvalidInputError
from ckptstore.format.strict_json import parse_json
from ckptstore.training.differences import ABSENT, Difference, differences
from ckptstore.training.plain import plain, spelled
from ckptstore.training.tokenizers import is_tokenizer, tokenizer_facts
from ckptstore.units import KIB, MIB

__all__ = ["ABSENT", "Difference", "Fingerprint", "differences", "fingerprint"]

Algorithm = Literal["blake3", "sha256"]

MAX_TEXT_FILE_BYTES = 16 * MIB
"""A larger file is taken byte by byte, whatever it holds."""
MAX_SHOWN_FILE_BYTES = 16 * KIB
"""The text of a smaller file stands in its document."""
MAX_FILES = 100_000
NO_CONTENT = frozenset({".git", ".hg", "__pycache__"})
"""Folders that say nothing of what a folder holds."""
_PIECE_BYTES = 4 * MIB
_DIGEST = re.compile(r"(blake3|sha256):[0-9a-f]{64}")


class _Hash(Protocol):
    def update(self, data: bytes, /) -> Any: ...
    def hexdigest(self) -> str: ...


_ALGORITHMS: dict[str, Callable[[], _Hash]] = {"blake3": blake3, "sha256": hashlib.sha256}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What something was, to be compared with what it is.

    Args:
        digest: `blake3:` or `sha256:` and 64 hexadecimal digits.
        document: Plain JSON that says what the digest is of; None if that is not known.

    Raises:
        InvalidInputError: The digest is none.
    """

    digest: str
    document: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.digest, str) or _DIGEST.fullmatch(self.digest) is None:
            raise InvalidInputError(
                f"{self.digest!r:.80} is no digest.",
                hint="Write it as `blake3:` or `sha256:` and 64 hexadecimal digits.",
            )


def fingerprint(what: object, *, algorithm: Algorithm = "blake3", without: Collection[str] = ()) -> Fingerprint:
    r"""Return the fingerprint of an object, a file, a folder, a tokenizer or a module.

    - A `Path` is what lies there. A file: its bytes, with the line ends of text made `\n`; JSON: what it says. A
      folder: the names of its files, with the digest of each.
    - A tokenizer, of transformers or tokenizers or with `get_vocab()`: its vocabulary, its special tokens, its chat
      template and how it is set up.
    - A module: its version and its source.
    - Anything else: its value, see `plain`. Text is text; give a file's name as a `Path`.
    - A `Fingerprint` is what it says.

    Args:
        what: To be told apart.
        algorithm: `blake3` or `sha256`.
        without: Paths in it that say nothing of what it is, such as `transformers_version`; of a folder, names of files
            relative to it.

    Raises:
        InvalidInputError: It cannot be told apart: where is named.
        NotFoundError: There is no such file.
    """
    if algorithm not in _ALGORITHMS:
        raise InvalidInputError(f"{algorithm!r} is no digest.", hint=f"Use one of {sorted(_ALGORITHMS)}.")
    if isinstance(what, Fingerprint):
        return what
    taking = _Taking(algorithm, frozenset(without))
    if isinstance(what, Path):
        return taking.folder(what) if what.is_dir() else taking.file(what)
    if isinstance(what, types.ModuleType):
        return taking.module(what)
    if is_tokenizer(what):
        return taking.document(plain(tokenizer_facts(what), what="The tokenizer", without=without))
    return taking.document(plain(what, what=f"The {type(what).__name__}", without=without))


@dataclass(frozen=True)
class _Taking:
    """How a fingerprint is taken."""

    algorithm: str
    without: frozenset[str]

    def document(self, document: Any) -> Fingerprint:
        return Fingerprint(self.of_bytes(spelled(document)), document)

    def of_bytes(self, body: bytes) -> str:
        found = _ALGORITHMS[self.algorithm]()
        found.update(body)
        return f"{self.algorithm}:{found.hexdigest()}"

    def file(self, path: Path) -> Fingerprint:
        size = _size_of(path)
        if size > MAX_TEXT_FILE_BYTES:
            digest = self._streamed(path)
            return Fingerprint(digest, {"digest": digest, "size": size})
        body = path.read_bytes()
        if path.suffix == ".json" and (said := _json(body, path)) is not None:
            return self.document(plain(said[0], what=str(path), without=self.without))
        text = _text(body)
        body = body if text is None else text.encode()
        digest = self.of_bytes(body)
        document = {"digest": digest, "size": len(body)}
        return Fingerprint(digest, document | ({"text": text} if text and len(body) <= MAX_SHOWN_FILE_BYTES else {}))

    def folder(self, path: Path) -> Fingerprint:
        files: dict[str, Any] = {}
        for name, file in _files(path):
            if name in self.without:
                continue
            if len(files) == MAX_FILES:
                raise InvalidInputError(
                    f"{path} holds more than {MAX_FILES} files.",
                    hint="Give a manifest of it instead: names and digests.",
                )
            files[name] = _Taking(self.algorithm, frozenset()).file(file).digest
        return self.document({"files": files})

    def module(self, module: types.ModuleType) -> Fingerprint:
        if not module.__file__:
            raise InvalidInputError(f"The module {module.__name__} has no file.", hint="Give its version as text.")
        path = Path(module.__file__)
        one = path.name != "__init__.py"
        sources = [(path.name, path)] if one else [pair for pair in _files(path.parent) if pair[0].endswith(".py")]
        files = {name: self.file(file).digest for name, file in sources if name not in self.without}
        version = getattr(module, "__version__", None)
        return self.document(
            {"files": files, "name": module.__name__, "version": None if version is None else str(version)}
        )

    def _streamed(self, path: Path) -> str:
        found = _ALGORITHMS[self.algorithm]()
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                found.update(piece)
        return f"{self.algorithm}:{found.hexdigest()}"


def _size_of(path: Path) -> int:
    if not path.is_file():
        known = "is no file and no folder" if path.exists() else "is not there"
        raise InvalidInputError(f"{path} {known}.", hint="Give the path of a file or a folder.", path=str(path))
    return path.stat().st_size


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file under a folder by its name relative to it, in order; nothing is left out unsaid."""
    for base, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if name not in NO_CONTENT)
        here = Path(base)
        for name in folders:
            if (here / name).is_symlink():
                raise InvalidInputError(
                    f"{here / name} is a link to a folder, which may lead anywhere.",
                    hint="Take the fingerprint of what it leads to by itself, or copy it.",
                    path=str(here / name),
                )
        for name in sorted(names):
            yield (here / name).relative_to(folder).as_posix(), here / name


def _raise(error: OSError) -> None:
    raise InvalidInputError(f"A folder cannot be read: {error}", hint="Let this process read it.") from error


def _text(body: bytes) -> str | None:
    """Return text with its line ends made one kind; None if it is none."""
    if b"\0" in body:
        return None
    try:
        return body.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def _json(body: bytes, path: Path) -> tuple[Any] | None:
    """Return what JSON says, in a tuple because it may say null; None if it is none."""
    try:
        return (parse_json(body.removeprefix(b"\xef\xbb\xbf"), what=str(path)),)
    except IntegrityError:
        return None
