"""One save of a training state: what its ranks hold, described so that it can be judged before it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.distributed.tensor import DTensor

import storage_writers as sw
from ckptstore.errors import DisagreementError
from ckptstore.format.checksum import hexdigest
from ckptstore.format.documents import Documents, encode_documents
from ckptstore.maintenance.retention import Keep
from ckptstore.training import sampled, shares
from ckptstore.training.cautions import caution
from ckptstore.training.meeting import Meeting, digest_of, union
from ckptstore.training.progress import Progress
from ckptstore.training.state import VALUES, Captured, Facts, TrainingState

STATE, FINGERPRINTS = "state", "fingerprints"
"""The names of two documents: what a state is made of, and what stands behind its fingerprints."""
RANKS_DIFFER = "ranks_differ"
"""In the record: components of which ranks held different tensors under the same names."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the user says of one save.

    Args:
        metrics: Numbers by name.
        tags: Labels.
        keep: What is to be kept.
        checkpoint_id: The name; None: after the step.
    """

    metrics: Mapping[str, float] | None = None
    tags: Sequence[str] = ()
    keep: Keep | None = None
    checkpoint_id: str | None = None

    def name_at(self, progress: Progress) -> str:
        """Return the checkpoint's name."""
        at = f"step-{progress.global_step}" + (f".micro-{progress.micro_step}" if progress.micro_step else "")
        return self.checkpoint_id or at


def save(
    state: TrainingState, writer: sw.CkptStoreWriter, meeting: Meeting, said: Said, *, background: bool
) -> sw.SaveFuture | None:
    """Save a state; in the background return as soon as it may be changed.

    Args:
        state: Is not changed.
        writer: Of the same ranks as `meeting`.
        meeting: Where the ranks agree on what they hold.
        said: Of this save.
        background: Return a future, and save meanwhile.

    Raises:
        UnsupportedError: A value cannot be stored; its place is named. On all ranks, before anything is uploaded.
        DisagreementError: Ranks hold different values of what must be the same.
        CkptStoreError: See `storage_writers.save` and `storage_writers.async_save`.

    If killed: see `CkptStoreWriter.finish`.
    """
    held, unlike = _held(state, meeting)
    whole = _compared(state, meeting, held, unlike)
    progress = state.progress

    def describe() -> None:
        writer.describe(
            global_step=progress.global_step,
            parallelism=state.parallelism,
            training_state={
                "progress": progress.as_json(),
                "lr": state.learning_rates()[:64],
                "scale": state.scales()[:64],
                **({} if said.keep is None else {"keep": said.keep.as_json}),
                **({RANKS_DIFFER: list(unlike.tensors)} if unlike.tensors else {}),
            },
            metrics=said.metrics,
            fingerprints=_digests(state) if meeting.rank == 0 else None,
            tags=said.tags,
            documents=_documents(state, held.facts if whole is None else whole) if meeting.rank == 0 else None,
        )

    meeting.all_do("describe", describe)
    if meeting.rank == 0:
        _warn_once(state, unlike.tensors)
        caution(state)
    without = _given_by_others(meeting, held, unlike)
    own = frozenset(name for name, holders in unlike.values.items() if meeting.rank in holders)
    plain = held.captured.state_dict(meeting.rank, own=own, without=without)
    name = said.name_at(progress)
    if background:
        group = meeting.alone_in if meeting.is_alone else meeting.saving_group
        return sw.async_save(plain, checkpoint_id=name, storage_writer=writer, process_group=group)
    group = None if meeting.is_alone else meeting.saving_group
    sw.save(plain, checkpoint_id=name, storage_writer=writer, process_group=group, no_dist=meeting.is_alone)
    return None


@dataclass(frozen=True, slots=True)
class _Held:
    """What this rank holds.

    Args:
        captured: Its part of the checkpoint.
        facts: What its state is made of.
        buffers: Keys of those that are no shares of anything.
        samples: Digests of a few elements of the tensors of each component.
    """

    captured: Captured
    facts: Facts
    buffers: Sequence[str]
    samples: Mapping[str, str]

    @property
    def digests(self) -> dict[str, str]:
        values = {f"{VALUES}/{name}": digest for name, digest in self.captured.digests.items()}
        samples = {f"{_SAMPLES}/{name}": digest for name, digest in self.samples.items()}
        return {**values, **samples, STATE: self.facts.digest, _BUFFERS: digest_of({"names": self.buffers})}


_BUFFERS, _SAMPLES = "buffers", "samples"


@dataclass(frozen=True, slots=True)
class _Unlike:
    """In what ranks are unlike, as the stages of a pipeline are, and who speaks for those that are like each other.

    Args:
        values: By component, the lowest rank of each digest; of those in which ranks differ.
        facts: The same of what states are made of; empty if all are alike.
        buffers: The same of which buffers there are.
        tensors: Components whose tensors differ, though ranks are made of the same: one rank's are stored.
    """

    values: Mapping[str, Sequence[int]]
    facts: Sequence[int]
    buffers: Sequence[int]
    tensors: Sequence[str]


def _held(state: TrainingState, meeting: Meeting) -> tuple[_Held, _Unlike]:
    """Return what this rank holds, and in what the ranks are unlike.

    Raises:
        DisagreementError: They are where they may not be: nothing could make one of them again.
    """
    taken: list[_Held] = []

    def take() -> dict[str, str]:
        captured, facts = state.capture(meeting.rank, meeting.world_size), state.facts()
        if meeting.rank == 0:
            _ = state.fingerprints  # which may have files to read
        named = facts.values["models"].items()
        keys = [f"{component}.{name}" for component, said in named for name in said["buffers"]]
        plain = [key for key in keys if not isinstance(captured.tensors[key], DTensor)]
        taken.append(_Held(captured, facts, plain, {} if meeting.is_alone else _samples(state, captured, plain)))
        return taken[0].digests

    def judge(parts: Sequence[Mapping[str, str]]) -> _Unlike:
        holders = {key: _first_of_each([part.get(key) for part in parts]) for key in {*chain(*parts)}}
        start = len(f"{VALUES}/")
        values = {key[start:]: ranks for key, ranks in holders.items() if key.startswith(f"{VALUES}/") and ranks}
        start = len(f"{_SAMPLES}/")
        tensors = [key[start:] for key, ranks in sorted(holders.items()) if key.startswith(f"{_SAMPLES}/") and ranks]
        tensors = [] if holders[STATE] else tensors  # ranks that are made of other parts hold others
        own = taken[0].captured.mergeable.keys()
        if wrong := sorted({*values, *tensors} - own):
            keys = {f"{VALUES}/{wrong[0]}", f"{_SAMPLES}/{wrong[0]}"}
            rank = next(rank for rank, part in enumerate(parts) if any(part.get(k) != parts[0].get(k) for k in keys))
            raise DisagreementError(
                f"Rank {rank} holds another {', '.join(wrong)} than rank 0.",
                hint="Give all ranks the same, or pass what is each rank's own as loader= or PerRank.",
                components=wrong,
                rank=rank,
            )
        return _Unlike(values, holders[STATE], holders[_BUFFERS], tensors)

    unlike = meeting.decide("capture", take, judge)
    return taken[0], unlike


def _samples(state: TrainingState, captured: Captured, buffers: Sequence[str]) -> dict[str, str]:
    handed_out = {name for name, module in state.models.items() if sampled.are_handed_out(module)}
    left_out = {key for key in buffers if any(key.startswith(f"{name}.") for name in handed_out)}
    return {
        name: sampled.sample_of(
            {key: each for key, each in captured.tensors.items() if key.startswith(f"{name}.")}, without=left_out
        )
        for name in state.parts
    }


def _warn_once(state: TrainingState, components: Sequence[str]) -> None:
    if components and state not in _warned:
        _warned.add(state)
        _log.warning(
            "Ranks hold different tensors of %s under the same names; for each tensor one rank's is saved. "
            "Are they replicas that do not exchange gradients, or buffers that each counts for itself?",
            ", ".join(components),
        )


_warned: WeakSet[TrainingState] = WeakSet()
_log = logging.getLogger("ckptstore.training")


def _first_of_each(digests: Sequence[str | None]) -> list[int]:
    """Return the lowest rank of each digest; nobody if all ranks have one."""
    first: dict[str | None, int] = {}
    for rank, digest in enumerate(digests):
        first.setdefault(digest, rank)
    return [rank for digest, rank in first.items() if digest is not None] if len(first) > 1 else []


def _compared(state: TrainingState, meeting: Meeting, held: _Held, unlike: _Unlike) -> Facts | None:
    """Return on rank 0 what the states of unlike ranks are made of together; None where all are alike.

    Raises:
        DisagreementError: They contradict each other.
    """
    if not unlike.values and not unlike.facts:
        return None
    whole: list[Facts] = []

    def mine() -> tuple[dict[str, str], Mapping[str, Any] | None]:
        names = sorted(name for name, holders in unlike.values.items() if meeting.rank in holders)
        return _entries(state, held.captured, names), held.facts.values if meeting.rank in unlike.facts else None

    def judge(parts: Sequence[tuple[Mapping[str, str], Mapping[str, Any] | None]]) -> None:
        entries, facts = zip(*parts, strict=True)
        _check_entries(entries)
        if unlike.facts:
            together = union("facts", facts)
            whole.append(Facts(together, digest_of(together)))

    meeting.decide("unlike", mine, judge)
    return whole[0] if whole else None


def _digests(state: TrainingState) -> dict[str, str]:
    return {name: one.digest for name, one in state.fingerprints.items()}


_told: WeakKeyDictionary[TrainingState, tuple[str, Documents]] = WeakKeyDictionary()
"""What the saves of a state said last, by the digest of its facts: it seldom changes, and encoding takes its time."""


def _documents(state: TrainingState, facts: Facts) -> Documents:
    """Return what stands behind the digests of a save."""
    known = _told.get(state)
    if known is None or known[0] != facts.digest:
        prints = state.fingerprints.items()
        behind = {name: one.document for name, one in prints if one.document is not None}
        known = _told[state] = facts.digest, encode_documents({FINGERPRINTS: behind, STATE: facts.values})
    return known[1]


def _entries(state: TrainingState, captured: Captured, names: Sequence[str]) -> dict[str, str]:
    """Return digests of what this rank holds of these components, by name."""
    return {
        f"{name}: {entry}": hexdigest(state.encoded(name, each))
        for name in names
        for entry, each in shares.entries(state.parts[name], captured.mergeable[name]).items()
    }


def _check_entries(parts: Sequence[Mapping[str, str]]) -> None:
    first: dict[str, tuple[str, int]] = {}
    for rank, part in enumerate(parts):
        for entry, digest in part.items():
            known, holder = first.setdefault(entry, (digest, rank))
            if known != digest:
                raise DisagreementError(
                    f"Ranks {holder} and {rank} hold different {entry}.",
                    hint="Give all ranks the same; ranks may hold different parts of a model, but not one differently.",
                    entry=entry,
                    ranks=[holder, rank],
                )


def _given_by_others(meeting: Meeting, held: _Held, unlike: _Unlike) -> frozenset[str]:
    """Return the buffers that a lower rank gives.

    Ranks may hold different ones under one name, as replicas do of what they count for themselves. Those of the lowest
    rank count, all of them: DDP hands them to the others, and a mixture would be nobody's.
    """
    if not unlike.buffers:
        return frozenset(held.buffers) if meeting.rank else frozenset()

    def judge(parts: Sequence[Sequence[str]]) -> dict[str, int]:
        return {key: rank for rank, part in reversed([*enumerate(parts)]) for key in part}

    speaks = meeting.rank in unlike.buffers
    holders = meeting.decide("buffers", lambda: held.buffers if speaks else [], judge)
    return frozenset(key for key in held.buffers if holders[key] != meeting.rank)
