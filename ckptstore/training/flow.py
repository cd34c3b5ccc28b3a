"""The way back to one checkpoint, in the one right order.

1 find it; 2 verify it; 3 compare fingerprints and facts; 4 decide whether this topology may load it; 5 let the target
allocate; 6 load and reshard; 7 restore everything else, random numbers last; 8 check before training. One rank decides
where one can; what fails on one rank fails on all.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import storage_writers as sw
from ckptstore import Checkpoint, CheckpointStore
from ckptstore.errors import CkptStoreError, IncompatibleStateError, IntegrityError, ResumeError
from ckptstore.training import gradients, optimizers, rng, shares
from ckptstore.training.asked import Asked
from ckptstore.training.checks import Standing, Summed, failed, static_checks
from ckptstore.training.compat import SAME
from ckptstore.training.gate import Facts, GateReport, check
from ckptstore.training.loaders import check_world_size, choose
from ckptstore.training.meeting import Meeting
from ckptstore.training.migrate import plan
from ckptstore.training.migrating import forms_of, migrate
from ckptstore.training.parts import OptimizerPart, Part
from ckptstore.training.report import ResumeReport
from ckptstore.training.room import Room
from ckptstore.training.sampler import BeforeFirst, ElasticSampler
from ckptstore.training.saving import FINGERPRINTS, RANKS_DIFFER, STATE
from ckptstore.training.state import GRADIENTS, PENDING, RNG, STANDING, VALUES, TrainingState, local_key, nested
from ckptstore.training.state import Facts as StateFacts


@dataclass
class Flow:
    """The way back to one checkpoint."""

    state: TrainingState
    asked: Asked
    meeting: Meeting
    store: CheckpointStore
    checkpoint: Checkpoint
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> ResumeReport:
        """Go it, and report."""
        with self._timed("verify"):
            self.meeting.led("verify", self._verify)
            if (hold := self.asked.hold) is not None:
                self.meeting.led("hold", lambda: hold(self.asked, self.store, self.checkpoint))
        with self._timed("compare"):
            gate = self._gate()
        with self._timed("allocate"):
            elsewhere = self._elsewhere(self.meeting.all_do("parts", self._held))
            room = self.meeting.all_do("targets", lambda: self._room(gate, elsewhere))
            room.migrated = frozenset(self.meeting.first_holders("migrated", room.migrators.keys()))
        with self._timed("load"):
            fetched = self._load(room)
        with self._timed("restore"):
            random = self.meeting.all_do("restore", lambda: self._restore(room))
        with self._timed("check"):
            checks = self._check(gate, room)
        at, commit = self.checkpoint, self.checkpoint.commit
        return ResumeReport(
            url=self.store.url,
            run=self.store.run,
            checkpoint_id=at.checkpoint_id,
            seq=at.seq,
            global_step=at.global_step,
            committed_at=at.committed_at,
            is_fresh=False,
            saved_world_size=at.saved_world_size,
            world_size=self.meeting.world_size,
            saved_parallelism=dict(commit.parallelism),
            parallelism=self.state.parallelism,
            decision=str(gate.decision),
            accepted=tuple(map(str, gate.accepted)),
            migrated=gate.migrated,
            fresh=tuple(sorted(gate.fresh)),
            left=tuple(sorted(gate.left)),
            unchecked=gate.unchecked,
            restored=(
                *room.values,
                *room.loaders,
                *([GRADIENTS] if room.gradients else []),
                *([RNG] if random else []),
            ),
            without_state=room.without_state,
            frozen_otherwise=room.frozen_otherwise,
            of_one_rank=tuple(map(str, commit.training_state.get(RANKS_DIFFER, ()))),
            lost_from=self.store.lost_from,
            random=random,
            checks=checks,
            bytes_fetched=fetched,
            seconds=self.seconds,
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - began

    def _verify(self) -> None:
        """Raise IntegrityError for damage that was read twice: what was read once may have been damaged on its way."""
        findings = self.store.verify(self.checkpoint, level=self.asked.level).findings
        if any(each.level == "chain" for each in findings):  # of which `verify` reads nothing twice
            again = {each.key for each in self.asked.open().verify(level="chain").findings}
            findings = tuple(replace(each, confirmed=each.confirmed or each.key in again) for each in findings)
        if damage := [each for each in findings if each.confirmed and each.is_damage]:
            first = damage[0]
            raise IntegrityError(
                f"{self.checkpoint.checkpoint_id} (seq {self.checkpoint.seq}) is damaged: {first.message}",
                hint=f"Run `ckptstore verify {self.store.url} {self.checkpoint.checkpoint_id} --level full`.",
                key=first.key,
            )

    def _gate(self) -> GateReport:
        """Decide on rank 0 whether this checkpoint may be loaded here, before anything is allocated or read."""
        mine = self.meeting.all_do("made of", self._facts)
        facts = self.meeting.gathered("facts", mine.values, digest=mine.digest)

        def judge() -> GateReport:
            documents, commit = self.checkpoint.documents(), self.checkpoint.commit
            saved = Facts(
                fingerprints=commit.fingerprints,
                documents=documents.get(FINGERPRINTS, {}),
                parallelism=commit.parallelism,
                world_size=commit.saved_world_size,
                state=documents.get(STATE, {}),
            )
            prints = {} if self.asked.only is not None else self.state.fingerprints
            now = Facts(
                fingerprints={name: one.digest for name, one in prints.items()},
                documents={name: one.document for name, one in prints.items()},
                parallelism=self.state.parallelism,
                world_size=self.meeting.world_size,
                state=facts or {},
            )
            if self.asked.only is not None:  # what it was trained on, and how that was computed, is another run's
                saved = replace(saved, fingerprints={}, documents={}, state=_without_precision(saved.state))
                now = replace(now, state=_without_precision(now.state))
            return check(
                saved,
                now,
                matrix=self.asked.matrix,
                migrators=self.state.migrators,
                allow=self.asked.allow,
                only=self.asked.only,
            )

        return self.meeting.led("gate", judge)

    def _facts(self) -> StateFacts:
        _ = self.state.parallelism  # of which only rank 0's is judged, and any rank may be unable to say it
        return self.state.facts()

    def _is_wanted(self, name: str) -> bool:
        only = self.asked.only
        return only is None or name in only or name.partition(".")[0] in only

    def _held(self) -> set[str]:
        return {f"{name}/{each}" for name, part in self.state.parts.items() for each in shares.held(part)}

    def _elsewhere(self, mine: set[str]) -> dict[str, set[str]]:
        """Return by component what other ranks hold of it and this one does not, as stages of a pipeline do."""
        elsewhere: dict[str, set[str]] = {name: set() for name in self.state.parts}
        for key in self.meeting.first_holders("held", mine).keys() - mine:
            name, _, each = key.partition("/")
            elsewhere.setdefault(name, set()).add(each)
        return elsewhere

    def _room(self, gate: GateReport, elsewhere: Mapping[str, set[str]]) -> Room:
        """Return what was saved beside tensors, and memory for these. Nothing of the state is touched."""
        room = Room()
        for name, loader in self.state.loaders.items():  # before anything is read
            if self.asked.only is None and name not in gate.fresh:
                saved_ranks = self.checkpoint.saved_world_size
                check_world_size(loader, saved=saved_ranks, now=self.meeting.world_size, name=name)
        for name, part in self.state.parts.items():
            if self._is_wanted(name) and name not in gate.fresh:
                room.values[name] = value = shares.share(part, self._value(name, part), elsewhere[name])
                room.tensors |= part.targets(value)
                if isinstance(part, OptimizerPart):
                    room.without_state += tuple(key for key, each in value["parameters"].items() if not each["state"])
                    room.frozen_otherwise += tuple(_frozen_otherwise(part, value))
        if self.asked.only is None:
            self._make_room_for_ranks(room, gate, elsewhere)
        saved = forms_of(self.checkpoint)
        room.migrators = plan(saved, forms_of(room.tensors), self.state.migrators)
        return room

    def _value(self, name: str, part: Part) -> Any:
        """Return what was saved of a component: by rank 0, and by those ranks that held something else."""
        keys = [f"{VALUES}/{name}", *(local_key(rank, name) for rank in range(self.checkpoint.saved_world_size))]
        found = [self._read(key) for key in keys if key in self.checkpoint.keys]
        if not found:
            raise IncompatibleStateError(
                f"{self.checkpoint.checkpoint_id} holds nothing of {name}.",
                hint=f"Pass allow=[{name!r}] to let it begin anew.",
            )
        value = shares.merged(part, found)
        if isinstance(part, OptimizerPart) and self.state.migrators:
            value = optimizers.reshaped(value, self._shapes)
        return value

    @property
    def _shapes(self) -> dict[str, list[int]]:
        """Those that parameters have here: where there are migrators, the gate saw that each change is covered."""
        return {name: list(each.shape) for name, each in self.state.parameters.items()}

    def _make_room_for_ranks(self, room: Room, gate: GateReport, elsewhere: Mapping[str, set[str]]) -> None:
        """The same, of what each rank has for itself."""
        ranks, rank = self.checkpoint.saved_world_size, self.meeting.rank
        for name, loader in self.state.loaders.items():
            if name in gate.fresh:
                continue
            if ranks == self.meeting.world_size:
                room.loaders[name] = self._read(local_key(rank, name))
            else:
                states = [self._read(local_key(each, name)) for each in range(ranks)]
                room.loaders[name] = choose(states, loader, rank=rank, world_size=self.meeting.world_size, name=name)
        room.rng = self._read(local_key(rank, RNG)) if rank < ranks else None
        if not self._read(f"{VALUES}/progress")["micro_step"]:
            return
        room.gradients = [self._read(local_key(each, PENDING)) for each in range(ranks)]
        if self.state.migrators:
            room.gradients = [gradients.reshaped(each, self._shapes) for each in room.gradients]
        room.pending = gradients.targets(
            self.state.parameters,
            room.gradients,
            rank=rank,
            world_size=self.meeting.world_size,
            reduction=self.state.gradient_reduction,
            elsewhere={each for name in self.state.optimizers for each in elsewhere[name]},
        )
        room.tensors |= {f"{GRADIENTS}.{key}": each for key, each in room.pending.shared.items()}
        for source, found in room.pending.local.items():
            room.tensors |= {local_key(source, f"{GRADIENTS}.{key}"): each for key, each in found.items()}

    def _read(self, key: str) -> Any:
        return self.checkpoint.value(key, types=self.state.types)

    def _load(self, room: Room) -> int:
        """Fill the memory, and return how many bytes this rank fetched."""
        direct = {key: each for key, each in room.tensors.items() if key not in room.migrators}
        ranks = range(self.checkpoint.saved_world_size)
        make = partial(
            sw.CkptStoreReader,
            self.asked.url,
            seq=self.checkpoint.seq,
            only=(
                *room.values,
                *((GRADIENTS, *(local_key(rank, GRADIENTS) for rank in ranks)) if room.gradients else ()),
            ),
            allow_unexpected=bool(room.migrated),
            engine=self.asked.engine,
            storage_options=self.asked.storage_options,
            transfer=self.asked.transfer,
            log=self.asked.log,
        )
        reader = self.meeting.all_do("reader", make)
        sw.load(nested(direct), storage_reader=reader, process_group=self.meeting.given, no_dist=self.meeting.is_alone)
        assert reader.report is not None  # noqa: S101  (the load has ended well)
        skipped = {*reader.report.skipped} - room.migrated
        self.meeting.all_do("skipped", lambda: _refuse_skipped(skipped))
        self.meeting.all_do("migrate", lambda: migrate(self.checkpoint, room.tensors, room.migrators))
        return reader.report.bytes_fetched

    def _restore(self, room: Room) -> tuple[str, ...]:
        """Let everything be what was saved; return what was done for random numbers, which come last."""
        for name, value in room.values.items():
            prefix = f"{name}."
            own = {key: each for key, each in room.tensors.items() if key.startswith(prefix)}
            with _telling_what_is_torn(name):
                self.state.parts[name].put(value, own)
        for name, place in room.loaders.items():
            with _telling_what_is_torn(name):
                self.state.loaders[name].load_state_dict(place)
        if room.pending is not None:
            gradients.apply(
                self.state.parameters,
                room.pending,
                room.gradients,
                world_size=self.meeting.world_size,
                reduction=self.state.gradient_reduction,
            )
        if self.asked.only is not None:
            return ()
        for name, sampler in self.state.samplers.items():
            if name not in room.values and isinstance(sampler, ElasticSampler):
                sampler.begin_epoch(self.state.progress.epoch)  # it begins anew, and the count of epochs goes on
        at = self.checkpoint
        seed = rng.derived_seed(self.store.run or "", at.global_step or 0, self.meeting.rank)
        restore = partial(rng.restore, room.rng, self.state.generators, seed=seed)
        done, again = restore(), BeforeFirst(restore)
        for sampler in self.state.samplers.values():
            if isinstance(sampler, ElasticSampler):
                sampler.before_first(again)  # in the middle of an epoch no loader began, and drew, when it was saved
        said = [f"restored: {', '.join(done.restored)}"] if done.restored else []
        said += [f"{name}: seeded, because {done.reasons.get(name, 'no state was saved')}" for name in done.seeded]
        said += [f"{name}: left, because {reason}" for name, reason in done.left.items()]
        return tuple(said)

    def _check(self, gate: GateReport, room: Room) -> tuple[str, ...]:
        """Compare where the state stands with where it stood. Collective.

        Raises:
            ResumeError: It is not what was saved.
        """
        if self.asked.only is not None:
            return ()
        saved, now = self.meeting.all_do("standing", self._standings)
        apart = gate.fresh | gate.left
        saved, now = saved.without(apart), now.without(apart)
        anew = self.meeting.first_holders("laid out", self._laid_out_anew(gate, room, saved, now))
        summed = {name: self._summed(name, room) for name in anew}

        def judge() -> tuple[str, ...]:
            found = static_checks(saved, now, summed=summed)
            if wrong := failed(found):
                raise ResumeError(
                    f"What was restored is not what was saved: {'; '.join(map(str, wrong))[:1000]}",
                    hint="Look for code that changes the state while it is being resumed, and resume again.",
                    wrong=[each.as_json() for each in wrong],
                )
            return tuple(map(str, found))

        return self.meeting.all_do("check", judge)

    def _standings(self) -> tuple[Standing, Standing]:
        last = self.checkpoint.saved_world_size - 1
        return self._stood(min(self.meeting.rank, last)), self.state.standing(self.meeting.world_size)

    def _stood(self, rank: int) -> Standing:
        return Standing.from_json(self._read(local_key(rank, STANDING)))

    def _moments_here(self, name: str) -> set[str]:
        return set(optimizers.capture(self.state.optimizers[name], self.state.parameters).tensors)

    def _laid_out_anew(self, gate: GateReport, room: Room, saved: Standing, now: Standing) -> list[str]:
        """Return the optimizers of which this rank holds other pieces than the same rank saved."""
        if gate.decision.category != SAME or saved.world_size != now.world_size:
            return sorted(now.moments)
        return [
            name
            for name, each in sorted(now.moments.items())
            if any(key.startswith(f"{name}.") for key in room.migrated)
            or (name in saved.moments and saved.moments[name].layout not in ("", each.layout))
        ]

    def _summed(self, name: str, room: Room) -> Summed:
        """Return what became of an optimizer's moments, over all ranks. Collective.

        Ranks may hold the same ones, so names are compared, and whether anything is not zero at all.
        """
        prefix, here = f"{name}.", self.meeting.all_do("moments", lambda: self._moments_here(name))
        given = {key.removeprefix(prefix) for key in room.tensors if key.startswith(prefix)}
        anywhere = self.meeting.first_holders(f"moments/{name}", here).keys()
        is_remade = any(key.startswith(prefix) for key in room.migrated)
        kept = {key.removeprefix(prefix) for key in self.checkpoint.keys if key.startswith(prefix)}
        ranks = range(self.checkpoint.saved_world_size)

        def judge(parts: Sequence[bool]) -> bool:
            return not any(parts) and any(self._stood(rank).moments[name].nonzero for rank in ranks)

        optimizer, parameters = self.state.optimizers[name], self.state.parameters
        dropped = self.meeting.decide(
            f"nonzero/{name}", lambda: optimizers.is_any_nonzero(optimizer, parameters), judge
        )
        missing = (given - here) | (set() if is_remade else kept - anywhere)
        more = (here - given) | (set() if is_remade else anywhere - kept)
        return Summed(tuple(sorted(missing)), tuple(sorted(more)), dropped)


def _frozen_otherwise(part: OptimizerPart, saved: Mapping[str, Any]) -> Iterator[str]:
    words = {True: "trained", False: "frozen"}
    for name, parameter in part.parameters.items():
        was = saved["parameters"].get(name, {}).get("trainable", parameter.requires_grad)
        if was != parameter.requires_grad:
            yield f"{name}: {words[was]} then, {words[parameter.requires_grad]} now"


@contextmanager
def _telling_what_is_torn(name: str) -> Iterator[None]:
    """Let an error of the user's own object name it, and say that others are restored already."""
    try:
        yield
    except CkptStoreError:
        raise
    except Exception as error:
        raise ResumeError(
            f"{name} does not take what was saved: {type(error).__name__}: {error!s:.300}. Other parts are restored "
            "already, so the state is a mixture now.",
            hint="Build it as it was when it was saved, and the whole state anew before it trains.",
            component=name,
            untouched=False,
        ) from error


def _refuse_skipped(skipped: Collection[str]) -> None:
    if extra := sorted(skipped):
        raise IncompatibleStateError(
            f"{len(extra)} tensors of the checkpoint have no place here: {', '.join(extra[:8])}.",
            hint="Build the state as it was saved.",
            unexpected=extra[:200],
        )


def _without_precision(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: each for kind, each in facts.items() if kind != "precision"}
