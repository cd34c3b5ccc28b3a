"""How the store is reached: the URL, and `--engine`, `--option` and `--require-signature`, which may stand anywhere.

What was said is also what hints say: a command that they tell to run names the run that this one was about.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from ckptstore.errors import InvalidInputError
from ckptstore.options import LogOptions, TransferOptions
from ckptstore.signing import KEY_FILE_VARIABLE, TRUSTED_VARIABLE, Signing
from ckptstore.store import CheckpointStore

NAMES = ("--engine", "--option", "-o", "--require-signature", "--signed-from")

# fmt: off
SHOWN_OPTIONS = (
    "account_host", "account_name", "addressing_style", "anon", "checksum_algorithm", "endpoint", "endpoint_url",
    "profile", "project", "region_name", "requester_pays", "use_emulator", "use_ssl", "verify",
)
# fmt: on
"""Options that are no secret. The value of any other is not repeated."""

_COMMAND = re.compile(r"`ckptstore\s[^`]*`")
_PLACE = re.compile(r"(?<= )URL(?=[ `])")
_LITERAL = re.compile(r"(?![A-Za-z][A-Za-z0-9+.-]*:)|(?:file|memory)://|(?:s3|gs|az)://[^@/]*(?:/|\Z)")
"""Where nothing after this is read as a user or a query: a path, a bucket's keys."""
_MAY_BE_SECRET = re.compile(r":[^@]*@|[?]")
"""A password, or a query."""

Engine = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="What moves the bytes: obstore, s3fs, gcsfs, fsspec.")
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="One of the store's storage_options, as often as needed; client_kwargs.verify=/ca.pem reaches inside. "
        "Secrets belong in the environment.",
    ),
]
RequireSignature = Annotated[
    list[str] | None,
    typer.Option(
        "--require-signature",
        metavar="KEYFILE",
        help="A public Ed25519 key, as often as needed: every record must be signed by one of them. "
        f"Also from {TRUSTED_VARIABLE}. {KEY_FILE_VARIABLE} names the private key that signs what a command appends.",
    ),
]
SignedFrom = Annotated[
    int | None, typer.Option("--signed-from", metavar="SEQ", help="The first signed slot of a run that began without.")
]


@dataclass(frozen=True, slots=True)
class Access:
    """What was said about the way to the store."""

    engine: str | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    url: str | None = None
    required: tuple[str, ...] = ()
    signing: Signing | None = None


_said = Access()


def keep(
    engine: str | None,
    options: Sequence[str],
    *,
    require_signature: Sequence[str] = (),
    signed_from: int | None = None,
) -> None:
    """Keep what was said, for the one command of this process.

    Raises:
        InvalidInputError: An option is not NAME=VALUE, or is said twice; a key cannot be read.
        UnsupportedError: Signatures need a package that is not installed.
    """
    global _said  # noqa: PLW0603  (a command is a process)
    nested: dict[str, Any] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not all(name.split(".")):
            raise InvalidInputError(  # the text is not shown: it could be a secret
                "An --option is not NAME=VALUE.", hint="Write --option region_name=eu-west-1, say."
            )
        *above, last = name.split(".")
        place = nested
        for key in above:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise InvalidInputError(f"--option {name} is inside of a value.", hint="Say it once.")
        if last in place:
            raise InvalidInputError(f"--option {name} is said twice.", hint="Say it once.")
        place[last] = _value(last, value)
    signing = Signing.from_environment(trusted=require_signature, signed_from=signed_from or 0)
    _said = Access(engine, nested, tuple(options), required=tuple(require_signature), signing=signing)


def forget() -> None:
    """Let go of what an earlier command of this process was told."""
    global _said  # noqa: PLW0603  (as above)
    _said = Access()


def keep_url(url: str) -> str:
    """Keep the URL that was given, and return it."""
    global _said  # noqa: PLW0603  (as above)
    _said = replace(_said, url=url)
    return url


def said() -> Access:
    """Return what was said."""
    return _said


def pointed(hint: str) -> str:
    """Return `hint` with what was given in place of `URL` in the commands it names, ready for a shell.

    No secret is repeated: a URL that may hold one stays the word, and an option's value becomes `...`.
    """
    url = _said.url
    if not url or (_MAY_BE_SECRET.search(url.partition("://")[2] or url) and not _LITERAL.match(url)):
        return hint
    words = [url if url[0] != "-" else f"./{url}"]
    words += ["--engine", _said.engine] if _said.engine else []
    words += [word for file in _said.required for word in ("--require-signature", file)]
    words += ["--signed-from", str(_said.signing.signed_from)] if _said.signing and _said.signing.signed_from else []
    for text in _said.options:
        name, _, value = text.partition("=")
        shown = name.rpartition(".")[2] in SHOWN_OPTIONS and not {"@", "?"}.intersection(value)
        words += ["-o", f"{name}={value if shown else '...'}"]
    place = shlex.join(words)
    return _COMMAND.sub(lambda command: _PLACE.sub(lambda _: place, command[0]), hint)


def log_options(log: LogOptions | None = None) -> LogOptions:
    """Return how the log is read and appended to: with the keys that were named, and never in a lost record's place."""
    return replace(log or LogOptions(), signing=_said.signing, refuse_lost_tail=True)


def open_run(
    url: str, *, log: LogOptions | None = None, transfer: TransferOptions | None = None, may_be_lost: bool = False
) -> CheckpointStore:
    """Return the run at `url`. See `CheckpointStore.open`.

    Raises:
        IntegrityError: The log is damaged; or was lost, unless it may be.
    """
    store = CheckpointStore.open(
        url,
        engine=_said.engine,
        storage_options=_said.storage_options,
        log=log_options(log),
        transfer=transfer,
    )
    if not may_be_lost:
        store.check_not_lost()
    return store


def moved_to_the_front(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with what is said about the store before the command, where it is looked for."""
    front: list[str] = []
    rest: list[str] = []
    left = list(arguments)
    while left and left[0] != "--":
        taken = front if left[0].partition("=")[0] in NAMES else rest
        taken.append(left.pop(0))
        if taken is front and "=" not in front[-1] and left:
            front.append(left.pop(0))
    return [*front, *rest, *left]


def _value(name: str, text: str) -> Any:
    """Return true, false, null and a number of seconds as what they are, and all else as text: a key may be digits."""
    if text.lower() in ("true", "false", "null"):
        return json.loads(text.lower())
    if name.endswith("timeout"):
        with contextlib.suppress(ValueError):
            return float(text)
    return text
