"""One save of a training state: what its ranks hold, described so that it can be judged before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch.distributed.tensor import DTensor

import storage_writers as sw
from ckptstore.errors import DisagreementError
from ckptstore.format.checksum import hexdigest
from ckptstore.format.documents import Documents, encode_documents
from ckptstore.training import shares
from ckptstore.training.meeting import Meeting, digest_of
from ckptstore.training.progress import Progress
from ckptstore.training.schedule import Keep
from ckptstore.training.state import Captured, TrainingState

STATE, FINGERPRINTS = "state", "fingerprints"
"""The names of two documents: what a state is made of, and what stands behind its fingerprints."""


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
    captured = meeting.all_do("capture", lambda: state.capture(meeting.rank, meeting.world_size))
    differing = _differing(state, meeting, captured)
    without = _given_by_others(state, meeting, captured)
    documents = _documents(state, meeting)
    prints = state.fingerprints
    progress = state.progress
    name = said.name_at(progress)
    writer.describe(
        global_step=progress.global_step,
        parallelism=state.parallelism,
        training_state={
            "progress": progress.as_json(),
            "lr": state.learning_rates()[:64],
            "scale": state.scales()[:64],
            **({} if said.keep is None else {"keep": said.keep.as_json}),
        },
        metrics=said.metrics,
        fingerprints={each: one.digest for each, one in prints.items()},
        tags=said.tags,
        documents=documents,
    )
    plain = captured.state_dict(meeting.rank, differing=differing, without=without)
    if background:
        return sw.async_save(plain, checkpoint_id=name, storage_writer=writer, process_group=meeting.alone_in)
    group, alone = meeting.given, meeting.is_alone
    sw.save(plain, checkpoint_id=name, storage_writer=writer, process_group=group, no_dist=alone)
    return None


_told: WeakKeyDictionary[TrainingState, tuple[str, Documents]] = WeakKeyDictionary()
"""What the saves of a state said last, by the digest of its facts: it seldom changes, and encoding takes its time."""


def _documents(state: TrainingState, meeting: Meeting) -> Documents | None:
    """Return, on rank 0, what stands behind the digests of a save: of all ranks, where they hold different parts."""
    facts = state.facts()
    whole = meeting.gathered("facts", facts.values, digest=facts.digest)
    if whole is None:
        return None
    digest = facts.digest if whole == facts.values else digest_of(whole)
    known = _told.get(state)
    if known is None or known[0] != digest:
        prints = state.fingerprints.items()
        behind = {name: one.document for name, one in prints if one.document is not None}
        known = _told[state] = digest, encode_documents({FINGERPRINTS: behind, STATE: whole})
    return known[1]


def _differing(state: TrainingState, meeting: Meeting, captured: Captured) -> frozenset[str]:
    """Return the components of which this rank holds another value than rank 0, where that may be.

    Raises:
        DisagreementError: It may not, or they contradict each other: nothing could make one of them again.
    """

    def judge(parts: Sequence[Mapping[str, str]]) -> list[list[str]]:
        for rank, part in enumerate(parts):
            unlike = sorted(name for name in {*part, *parts[0]} if part.get(name) != parts[0].get(name))
            if wrong := [name for name in unlike if name not in captured.mergeable]:
                raise DisagreementError(
                    f"Rank {rank} holds another {', '.join(wrong)} than rank 0.",
                    hint="Give all ranks the same, or pass what is each rank's own as loader= or PerRank.",
                    components=wrong,
                    rank=rank,
                )
        return [sorted(name for name in part if part[name] != parts[0].get(name)) for part in parts]

    differing = meeting.decide("values", lambda: captured.digests, judge)
    if names := sorted({name for each in differing for name in each}):
        meeting.decide("entries", lambda: _entries(state, captured, names), _check_entries)
    return frozenset(differing[meeting.rank])


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


def _given_by_others(state: TrainingState, meeting: Meeting, captured: Captured) -> frozenset[str]:
    """Return the buffers that a lower rank gives.

    Ranks may hold different ones under one name, as replicas do of what they count for themselves. Those of the lowest
    rank count, all of them: DDP hands them to the others, and a mixture would be nobody's.
    """
    if meeting.is_alone:
        return frozenset()
    named = state.facts().values["models"].items()
    keys = [f"{component}.{name}" for component, facts in named for name in facts["buffers"]]
    whole = [key for key in keys if not isinstance(captured.tensors[key], DTensor)]
    holders = meeting.first_holders("buffers", whole)
    return frozenset(key for key in whole if holders[key] != meeting.rank)
