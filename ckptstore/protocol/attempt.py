"""The beginning of a save: a prefix that nobody else ever writes to, before the first byte."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptstore.errors import InvalidInputError, NotFoundError
from ckptstore.events import AttemptBegan, tell
from ckptstore.format.canonical import canonical_json
from ckptstore.format.codec import MAX_DIRECT_PARTS, MAX_INFLATED_BYTES, MAX_PART_BYTES, PartRef
from ckptstore.format.documents import Documents
from ckptstore.format.layout import Stem, encode_name
from ckptstore.format.records import Commit, Envelope, ShardTotals, encode_record
from ckptstore.format.version import FORMAT
from ckptstore.protocol.claim import Incarnation, Takeover, check_not_fenced, claim
from ckptstore.protocol.log import RunLog
from ckptstore.signing import Signing
from ckptstore.units import KIB

MAX_DESCRIPTION_BYTES = 16 * KIB
"""Of all that the user says of a save, as JSON. With it and 128 parts a record stays below 64 KiB."""
MAX_DEPTH = 32
MAX_SOFTWARE_BYTES = 1 * KIB
MAX_INTEGER = 2**63 - 1
MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Description:
    """What the user says of a save. Checked and bounded here, so that nothing is refused after the upload.

    Args:
        global_step: The training step, or None.
        parallelism: Degrees by name: dp, tp, pp and so on.
        training_state: Counters such as epoch and consumed_samples, as JSON.
        metrics: Numbers by name; non-finite ones are allowed.
        fingerprints: Digests by name.
        tags: Labels.
        documents: What stands behind the digests, from `encode_documents`. It has a limit of its own.

    Raises:
        InvalidInputError: A value is not what it must be (it is named), is nested more than 32 deep, or all together
            take more than 16 KiB.
    """

    global_step: int | None = None
    parallelism: Mapping[str, int] = field(default_factory=dict)
    training_state: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    tags: Sequence[str] = ()
    documents: Documents | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.documents, Documents | None):
            raise _unfit("documents", "what `encode_documents` returned", self.documents)
        step = self.global_step if self.global_step is None else _whole("global_step", self.global_step)
        plain = {
            "global_step": step,
            "parallelism": _table("parallelism", self.parallelism, _whole),
            "training_state": _table("training_state", self.training_state, lambda _, value: value),
            "metrics": _table("metrics", self.metrics, _number),
            "fingerprints": _table("fingerprints", self.fingerprints, _text),
            "tags": _tags(self.tags),
        }
        size = sum(len(canonical_json(value, what=name, max_depth=MAX_DEPTH)) for name, value in plain.items())
        if size > MAX_DESCRIPTION_BYTES:
            raise InvalidInputError(
                f"The description of the save takes {size} bytes, {MAX_DESCRIPTION_BYTES} are allowed.",
                hint="Describe less; what is large belongs into the state that is saved.",
                size=size,
            )
        for name, value in plain.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at writing a checkpoint. Picklable: it travels to all ranks.

    Args:
        run: Identity of the run.
        stem: Names its prefix; nobody else ever writes there (I6).
        world_size: Ranks in the save's group.
        description: What the user says of it.
    """

    run: str
    stem: Stem
    world_size: int
    description: Description

    @property
    def global_step(self) -> int | None:
        """The training step."""
        return self.description.global_step

    def record(
        self,
        *,
        shards: ShardTotals,
        parts: Sequence[PartRef],
        documents: PartRef | None,
        software: Mapping[str, str],
    ) -> Commit:
        """Return the commit of this attempt, without a parent."""
        said = self.description
        return Commit(
            checkpoint_id=self.stem.name,
            global_step=said.global_step,
            term=self.stem.term,
            attempt=self.stem.attempt,
            parent=None,
            prefix=str(self.stem),
            saved_world_size=self.world_size,
            parallelism=dict(said.parallelism),
            training_state=dict(said.training_state),
            fingerprints=dict(said.fingerprints),
            metrics=dict(said.metrics),
            tags=tuple(said.tags),
            shards=shards,
            parts=tuple(parts),
            documents=documents,
            software=dict(software),
        )


def begin(
    log: RunLog,
    incarnation: Incarnation,
    *,
    checkpoint_id: str,
    world_size: int,
    description: Description | None = None,
    takeover: Takeover = "always",
) -> Attempt:
    """Choose the prefix of a new attempt, claiming the run first if this incarnation has not; read the log before.

    Raises:
        FencedError: A newer incarnation has claimed the run: before a byte was uploaded.
        ConflictError: `takeover` is `same_job` and another job holds the run.
        InvalidInputError: The name or the world size cannot be recorded.
        IntegrityError: The log is damaged, was lost, or was removed since it was read.
        NotFoundError: The log was opened for reading and there is no run.

    If killed: perhaps a claim. Nothing of the attempt exists yet.
    """
    encode_name(checkpoint_id)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise InvalidInputError(f"world_size must be 1 or more, not {world_size!r:.80}.")
    incarnation.check()
    fold = log.refresh().whole()
    if log.run is None:
        raise NotFoundError(f"There is no run at {log.store.url}.", hint="Open it for writing first.")
    log.check_tail()
    check_not_fenced(fold, incarnation, incarnation.term)
    stem = Stem(checkpoint_id, fold.term + 1, 1, log.ids.nonce())
    attempt = Attempt(fold.run, stem, world_size, description or Description())
    _check_encodable(attempt, log.options.signing)
    term = claim(log, incarnation, takeover=takeover)
    stem = replace(stem, term=term, attempt=incarnation.next_attempt(log.fold))
    tell(log.observer, AttemptBegan(checkpoint_id=checkpoint_id, prefix=str(stem), run=attempt.run))
    return replace(attempt, stem=stem)


def _check_encodable(attempt: Attempt, signing: Signing | None) -> None:
    """Encode the largest commit that this attempt can end in, so that nothing is refused after the upload."""
    path = attempt.stem.part_key(0)
    part = PartRef(path, MAX_PART_BYTES, "0" * 64, MAX_INFLATED_BYTES, (0, attempt.world_size))
    record = attempt.record(
        shards=ShardTotals(attempt.world_size, MAX_INTEGER),
        parts=[part] * MAX_DIRECT_PARTS,
        documents=replace(part, path=attempt.stem.fingerprints_key),
        software={"software": " " * MAX_SOFTWARE_BYTES},
    )
    envelope = Envelope(FORMAT, attempt.run, MAX_INTEGER, "0" * 32, " " * 32, "0" * 64, "0" * 64)
    encode_record(replace(record, parent=MAX_INTEGER), envelope, signing=signing)


def _table(name: str, value: object, checked: Callable[[str, Any], Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _unfit(name, "a table with text for keys", value)
    return {key: checked(f"{name}[{key!r}]", inner) for key, inner in value.items()}


def _tags(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple | set | frozenset):
        raise _unfit("tags", "a list of texts", value)
    return tuple(_text("a tag", tag) for tag in (value if isinstance(value, list | tuple) else sorted(value, key=str)))


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < 2**63:
        raise _unfit(name, "a whole number from 0 to 2^63 - 1", value)
    return int(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _unfit(name, "a number (pass float(value))", value)
    try:
        return float(value)
    except OverflowError:
        raise _unfit(name, "a number that a float can hold", value) from None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _unfit(name, "text", value)
    return value


def _unfit(name: str, wanted: str, value: object) -> InvalidInputError:
    huge = isinstance(value, int) and abs(value) >= 10**MAX_SHOWN
    shown = "one of many digits" if huge else f"{type(value).__name__} {value!r:.80}"
    return InvalidInputError(
        f"{name} must be {wanted}, not {shown}.", hint="Correct it where describe() is called.", field=name
    )
