"""The only file that spells a key.

Keys are relative to the run's root. Numbers have at least the stated digits, are below 2^63, and are parsed from the
right; what does not parse is foreign and is left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ckptstore.errors import IntegrityError, InvalidInputError

RUN_KEY = "run.json"
LATEST_KEY = "latest.json"
LOG_PREFIX = "log/"
DATA_PREFIX = "data/"
STATE_PREFIX = "state/"
PROBE_PREFIX = "probe/"
DRILL_PREFIX = "drill/"
"""Where drills have runs of their own; to the run beside them it is foreign."""
LANES = 16

MAX_NAME_BYTES = 120
SLOT_DIGITS = 12

_LARGEST = 2**63 - 1  # 19 digits: of more, none is read as a number
_SLOT = re.compile(r"(?:log|state)/([0-9]{12,19})\.json")
_STEM = re.compile(r"(.+)\.t([0-9]{4,19})\.a([0-9]{4,19})\.([0-9a-f]{32})")
_FILE = re.compile(
    r"rank-(?P<rank>[0-9]{5,19})\.safetensors|part-(?P<part>[0-9]{5,19})\.json\.gz"
    r"|fingerprints\.json\.gz|trace\.json|COMMITTED"
)


def slot_key(seq: int) -> str:
    """Return the key of log slot `seq`: `log/000000000042.json`."""
    return f"{LOG_PREFIX}{seq:0{SLOT_DIGITS}d}.json"


def state_key(seq: int) -> str:
    """Return the key of the hint that holds the fold below slot `seq`."""
    return f"{STATE_PREFIX}{seq:0{SLOT_DIGITS}d}.json"


def parse_slot(key: str) -> int | None:
    """Return the number in a key of the log or of `state/`, or None if the key is foreign."""
    match = _SLOT.fullmatch(key)
    if match is None:
        return None
    seq = int(match[1])
    return seq if seq <= _LARGEST and key in (slot_key(seq), state_key(seq)) else None


def lane_prefix(lane: int) -> str:
    """Return the prefix of a lane (0 to 15), which holds one in sixteen of an attempt's shards; 0 holds all else."""
    return f"{DATA_PREFIX}{lane:x}/"


def encode_name(name: str) -> str:
    """Return a checkpoint's name as one key segment: all but letters, digits, `.`, `_`, `-` percent-encoded.

    Raises:
        InvalidInputError: The name is empty, no text, ends in `@` and digits (the syntax of `name@seq`), holds what
            UTF-8 cannot, or is longer than 120 bytes once encoded.
    """
    if not isinstance(name, str) or not name:
        raise InvalidInputError(
            f"A checkpoint's name must be text that is not empty, not {name!r}.",
            hint="Pass checkpoint_id='step-12000', say.",
        )
    if re.search(r"@[0-9]+$", name):
        raise InvalidInputError(
            f"The name {name!r} ends in '@' and digits, which is how one commit of a name is asked for.",
            hint="Use another name.",
            name=name,
        )
    try:
        encoded = quote(name, safe="")
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"The name {name!r} cannot be written as UTF-8.", hint="Use another name.") from error
    encoded = encoded.replace("~", "%7E")
    if len(encoded) > MAX_NAME_BYTES:
        raise InvalidInputError(
            f"The name {name[:40]!r}… takes {len(encoded)} bytes once encoded; {MAX_NAME_BYTES} are allowed.",
            hint="Use a shorter name.",
            encoded_bytes=len(encoded),
        )
    return encoded


@dataclass(frozen=True, slots=True)
class Stem:
    """What names an attempt: its checkpoint's name, term, number and nonce (32 hexadecimal digits)."""

    name: str
    term: int
    attempt: int
    nonce: str

    def __str__(self) -> str:
        return f"{encode_name(self.name)}.t{self.term:04d}.a{self.attempt:04d}.{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Stem | None:
        """Return the stem that `text` spells, or None if it is foreign."""
        match = _STEM.fullmatch(text)
        if match is None:
            return None
        try:
            stem = cls(unquote(match[1], errors="strict"), int(match[2]), int(match[3]), match[4])
            return stem if max(stem.term, stem.attempt) <= _LARGEST and str(stem) == text else None
        except (InvalidInputError, UnicodeDecodeError):
            return None

    def prefix(self, lane: int = 0) -> str:
        """Return the attempt's prefix in a lane (0 to 15), with its trailing slash."""
        return f"{lane_prefix(lane)}{self}/"

    def shard_key(self, rank: int) -> str:
        """Return the key of one rank's shard. Its lane is the last hexadecimal digit of the rank."""
        return f"{self.prefix(rank % LANES)}rank-{rank:05d}.safetensors"

    def part_key(self, index: int) -> str:
        """Return the key of a manifest part."""
        return f"{self.prefix()}part-{index:05d}.json.gz"

    @property
    def committed_key(self) -> str:
        """The key of the copy of the commit record (a hint)."""
        return f"{self.prefix()}COMMITTED"

    @property
    def fingerprints_key(self) -> str:
        """The key of the documents behind the fingerprints."""
        return f"{self.prefix()}fingerprints.json.gz"

    @property
    def trace_key(self) -> str:
        """The key of the trace."""
        return f"{self.prefix()}trace.json"


@dataclass(frozen=True, slots=True)
class DataKey:
    """A key under `data/`, taken apart. `rank` and `part` are None for the other files."""

    stem: Stem
    lane: int
    file: str
    rank: int | None
    part: int | None


def parse_data_key(key: str) -> DataKey | None:
    """Return what a key under `data/` says, or None if it is foreign."""
    pieces = key.split("/")
    if len(pieces) != 4 or pieces[0] != "data" or not re.fullmatch("[0-9a-f]", pieces[1]):  # noqa: PLR2004
        return None
    stem, match = Stem.parse(pieces[2]), _FILE.fullmatch(pieces[3])
    if stem is None or match is None:
        return None
    rank = int(match["rank"]) if match["rank"] else None
    part = int(match["part"]) if match["part"] else None
    parsed = DataKey(stem, int(pieces[1], 16), pieces[3], rank, part)
    spelled = (
        stem.shard_key(rank)
        if rank is not None
        else stem.part_key(part)
        if part is not None
        else stem.prefix() + pieces[3]
    )
    return parsed if spelled == key and max(rank or 0, part or 0) <= _LARGEST else None


def own_key(path: object, *, stem: Stem, what: str) -> DataKey:
    """Return `path` taken apart, after checking that it lies under the attempt `stem`.

    Raises:
        IntegrityError: It is no text, is absolute or not normal, does not match the grammar, or is another attempt's.
    """
    parsed = parse_data_key(path) if isinstance(path, str) else None
    if parsed is None or parsed.stem != stem:
        raise IntegrityError(
            f"{what} names the path {str(path)[:200]!r}, which is not under its own attempt {stem}.",
            hint="Run `ckptstore verify URL` and load an older checkpoint.",
            path=str(path)[:200],
            attempt=str(stem),
        )
    return parsed
