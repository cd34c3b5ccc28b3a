"""What a careless program forgets is caught: by the gate, by a check after the resume, or by its first steps.

Each fault is made as a program would make it. The tables below say what catches it; EVIDENCE.md holds them, too.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ckptstore import CheckpointStore, IncompatibleStateError, ResumeError
from ckptstore.training import Checkpointer, ElasticSampler, GrownVocabulary

sys.path.insert(0, str(Path(__file__).parent))
from small_language import BATCH, PROOF_STEPS, TEXTS, WORDS, Pairs, Program, save_in_the_middle, seed_all

STEP = 5
MIGRATOR = GrownVocabulary(("embed.weight", "head.weight", "head.bias"), fields=("tokenizer",))


@dataclass(frozen=True)
class Fault:
    """A fault, and what catches it.

    Args:
        fault: Which.
        program: What the program does.
        named: What is named: places in facts, checks, or quantities of the first step that differ, all of them.
        how: Arguments of the program that is careless from its beginning.
        does: What it does wrong later.
        saved: Arguments of the program that saved, if it was careless already.
    """

    fault: str
    program: str
    named: tuple[str, ...]
    how: dict[str, Any] | None = None
    does: Callable[[Program], object] | None = None
    saved: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.fault}: {self.program}"


def without(name):
    return {"without": (name,)}


GATE = [
    Fault("scheduler not restored", "does not hand it over", ("components.scheduler",), without("scheduler")),
    Fault("moments dropped", "does not hand the optimizer over", ("components.optimizer",), without("optimizer")),
    Fault("cursor at epoch start", "does not hand the sampler over", ("components.sampler",), without("sampler")),
    Fault("scaler reset", "does not hand it over", ("components.scaler",), without("scaler")),
    Fault("scaler reset", "makes it disabled", ("scalers.scaler: true → false",), {"scaled": False}),
    Fault(
        "another dataset",
        "reads a file that was changed",
        ('fingerprints.dataset.files.b.txt: "blake3:bb" → "blake3:cc"',),
        {"texts": {**TEXTS, "files": {"a.txt": "blake3:aa", "b.txt": "blake3:cc"}}},
    ),
    Fault(
        "another dataset",
        "has one sample more",
        ("samplers.sampler.length: 96 → 97",),
        {"dataset": Pairs(97)},
    ),
    Fault(
        "another tokenizer",
        "has two tokens the other way round",
        (
            "fingerprints.tokenizer.vocabulary.tokens.word0: 0 → 1",
            "fingerprints.tokenizer.vocabulary.tokens.word1: 1 → 0",
        ),
        {"words": [WORDS[1], WORDS[0], *WORDS[2:]]},
    ),
    Fault(
        "one layer more",
        "builds it",
        (
            'models.model.parameters.layers.1.weight: absent → ["float32", [8, 8]]',
            'models.model.parameters.layers.1.bias: absent → ["float32", [8]]',
        ),
        {"layers": 2},
    ),
    Fault(
        "vocabulary changed",
        "builds a larger one",
        (
            'models.model.parameters.embed.weight: ["float32", [11, 8]] → ["float32", [13, 8]]',
            'models.model.parameters.head.bias: ["float32", [11]] → ["float32", [13]]',
        ),
        {"vocabulary": 13},
    ),
    Fault(
        "another optimizer class",
        "takes SGD",
        ('optimizers.optimizer.class: "torch.optim.adamw.AdamW" → "torch.optim.sgd.SGD"',),
        {"optimizer": torch.optim.SGD},
    ),
]
"""Refused before anything is allocated, read or changed."""


def reset_scaler(program):
    program.scaler.load_state_dict(program.make_scaler().state_dict())


def begin_the_epoch_again(program):
    program.sampler.load_state_dict({**program.sampler.state_dict(), "cursor": 0})


def count_from_zero(program):
    program.progress.micro_step = 0


CHECKS = [
    Fault("scheduler not restored", "makes a new one in a callback", ("lr optimizer",), does=Program.make_scheduler),
    Fault("moments dropped", "clears them in a callback", ("moments optimizer",), does=lambda p: p.opt.state.clear()),
    Fault("cursor at epoch start", "rewinds in a callback", ("cursor sampler",), does=begin_the_epoch_again),
    Fault("scaler reset", "resets it in a callback", ("scale scaler",), does=reset_scaler),
    Fault("micro-step lost", "sets it to 0 in a callback", ("micro_step",), does=count_from_zero),
]
"""Refused after everything was restored, before a step is taken: something of the program changed it meanwhile."""


def make_again(name):
    """Return what makes a part again after the resume, for the loop to use in place of the one that was resumed."""
    return lambda program: setattr(program, name, getattr(program, f"make_{name}")())


def new_optimizer(program):
    program.opt = program.make_optimizer()


def new_sampler(program):
    program.sampler = ElasticSampler(program.dataset, batch_size=BATCH, seed=5)


def own_counter(program):
    program.micro_step = 0


PROOF = [
    Fault("scheduler not restored", "makes it after the resume", ("lr", "update_norm"), does=make_again("scheduler")),
    Fault("scheduler not restored", "steps it once more", ("lr", "update_norm"), does=lambda p: p.scheduler.step()),
    Fault(
        "scheduler not restored",
        "never handed it over",
        ("lr",),
        without("scheduler"),
        saved=without("scheduler"),
    ),
    Fault("moments dropped", "makes the optimizer after the resume", ("update_norm",), does=new_optimizer),
    Fault("moments dropped", "clears them after the resume", ("update_norm",), does=lambda p: p.opt.state.clear()),
    Fault(
        "moments dropped",
        "never handed the optimizer over",
        ("update_norm",),
        without("optimizer"),
        saved=without("optimizer"),
    ),
    Fault(
        "cursor at epoch start",
        "makes the sampler after the resume",
        ("batch_digest", "loss", "grad_norm", "update_norm"),
        does=new_sampler,
    ),
    Fault(
        "cursor at epoch start",
        "never handed the sampler over",
        ("batch_digest", "loss", "grad_norm", "update_norm"),
        without("sampler"),
        saved=without("sampler"),
    ),
    Fault(
        "RNG not restored",
        "seeds once more when the loop has begun",
        ("loss", "grad_norm", "update_norm"),
        does=lambda p: setattr(p, "first", lambda: seed_all(p.seed)),
    ),
    Fault(
        "scaler reset",
        "makes it after the resume",
        ("scale", "grad_norm", "update_norm"),
        does=make_again("scaler"),
    ),
    Fault(
        "another dataset",
        "gives no fingerprint of its texts, which are others",
        ("loss", "grad_norm", "update_norm"),
        {"dataset": Pairs(text=1)},
    ),
    Fault("micro-step lost", "zeroes gradients first", ("grad_norm", "update_norm"), does=lambda p: p.opt.zero_grad()),
    Fault(
        "micro-step lost",
        "counts micro-steps from 0 again",
        ("samples", "batch_digest", "loss", "grad_norm", "update_norm"),
        does=own_counter,
    ),
    Fault(
        "micro-step lost",
        "never counted them in progress",
        ("samples", "batch_digest", "loss", "grad_norm", "update_norm"),
        {"counts": False},
        saved={"counts": False},
    ),
]
"""Told by the steps after the resume: the program changed what it trains with, or never had it saved."""


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return the root of a run that a program saved, by how it was."""
    made: dict[str, Path] = {}

    def at(how):
        name = repr(how)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("run") / "run"
            save_in_the_middle(made[name], **(how or {}))
        return made[name]

    return at


@pytest.fixture(scope="module")
def unreadable(run_of, tmp_path_factory):
    """Return a root where a checkpoint is listed, and no byte of its shards is what it was: who reads one fails."""
    source, root = run_of(None), tmp_path_factory.mktemp("unreadable") / "run"
    for path in source.rglob("*"):
        if path.is_file():
            body = path.read_bytes()
            copied = root / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(bytes(len(body)) if path.suffix == ".safetensors" else body)
    return root


def all_of(program):
    """Return everything that a resume may change."""
    return copy.deepcopy(
        {
            "weights": {name: each.tolist() for name, each in program.model.state_dict().items()},
            "gradients": [each.grad for each in program.model.parameters()],
            "optimizer": repr(program.opt.state_dict()),
            "scheduler": program.scheduler.state_dict(),
            "scaler": program.scaler.state_dict(),
            "sampler": program.sampler.state_dict(),
            "callback": program.callback.state_dict(),
            "progress": program.progress.as_json(),
            "seen": program.seen,
            "random": (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()),  # noqa: NPY002
        }
    )


class Allocations(TorchDispatchMode):
    """Notes what makes tensors."""

    def __init__(self):
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in str(function) for word in ("empty", "zeros", "ones", "full", "rand", "clone", "copy", "new_")):
            self.made.append(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def nothing_done(program):
    """Check that the block allocates no tensor and leaves all of a program as it was."""
    before, allocations = all_of(program), Allocations()
    with allocations:
        yield
    assert allocations.made == []
    assert all_of(program) == before


def resumed(program, url, **asked):
    """Resume and go on for as many steps as prove it; return the report."""
    with Checkpointer(url, program.state, proof_steps=PROOF_STEPS) as checkpointer:
        report = program.resume(checkpointer, **asked)
        yield report
        program.train(STEP + PROOF_STEPS, checkpointer, after_first_batch=getattr(program, "first", None))
    yield report


@pytest.mark.parametrize("fault", GATE, ids=str)
def test_the_gate_refuses_and_names_what_differs_and_nothing_was_done(unreadable, fault):
    program = Program(seed=7, **fault.how)
    with (
        Checkpointer(unreadable, program.state) as checkpointer,
        nothing_done(program),
        pytest.raises(IncompatibleStateError) as caught,
    ):
        program.resume(checkpointer)
    for place in fault.named:
        assert place in caught.value.message
    assert caught.value.facts["count"] == len(caught.value.facts["differences"])
    assert caught.value.hint


@pytest.mark.parametrize("fault", CHECKS, ids=str)
def test_a_check_after_the_resume_names_what_is_not_what_was_saved(run_of, fault):
    program = Program(seed=7)
    program.callback.when_resumed = lambda: fault.does(program)
    with Checkpointer(run_of(None), program.state) as checkpointer, pytest.raises(ResumeError) as caught:
        program.resume(checkpointer)
    assert tuple(each["name"] for each in caught.value.facts["wrong"]) == fault.named


@pytest.mark.parametrize("fault", PROOF, ids=str)
def test_the_first_steps_differ_in_what_the_fault_changes(run_of, fault, caplog):
    url = run_of(fault.saved)
    program = Program(seed=7, **(fault.how or {}))
    steps = resumed(program, url)
    report = next(steps)
    assert report.proof is None
    if fault.does is not None:
        fault.does(program)
    with caplog.at_level(logging.WARNING):
        next(steps)
    assert report.proof.verdict == "differs"
    first = [row for row in report.proof.differing if row.global_step == STEP + 1]
    assert {row.quantity for row in first} == {*fault.named}
    assert report.proof.first_batch == ("other" if "batch_digest" in fault.named else "same")
    assert "differs: " in caplog.text
    assert report.table().endswith("differs")
    assert CheckpointStore.open(url).latest().proved is None


def test_a_program_that_forgets_nothing_is_proved(run_of, tmp_path):
    """Else what the tests above see might be there without any fault."""
    url = tmp_path / "run"
    control = save_in_the_middle(url)
    program = Program(seed=7)
    *_, report = resumed(program, url)
    assert (report.proof.verdict, report.proof.first_batch, report.proof.resume_loss_delta) == ("proved", "same", 0)
    assert {row.quantity for row in report.proof.rows if row.within} == {
        *("global_step", "loss", "grad_norm", "lr", "scale", "batch_digest", "samples", "update_norm")
    }
    assert program.callback.resumes == 1
    assert all_of(program)["weights"] == all_of(control)["weights"]
    assert CheckpointStore.open(url).latest().proved.startswith("proved: 4 steps, exact, first batch same")


def grown(**options):
    """Return a program of two more words."""
    return Program(seed=7, vocabulary=13, words=[*WORDS, "new", "newer"], options=options)


def test_a_migrator_opens_a_larger_vocabulary_and_what_is_new_begins_with_nothing(run_of):
    saved, program = Program(seed=7), grown(migrators=[MIGRATOR])
    for each in (saved, program):
        with Checkpointer(run_of(None), each.state) as checkpointer:
            report = each.resume(checkpointer)
    assert report.migrated
    assert all(line.endswith(f"(by {MIGRATOR.name})") for line in report.migrated)
    old, new = saved.state.parameters, program.state.parameters
    for name in MIGRATOR.keys:
        pairs = [(old[name].grad, new[name].grad)]
        pairs += [
            (saved.opt.state[old[name]][one], program.opt.state[new[name]][one]) for one in ("exp_avg", "exp_avg_sq")
        ]
        for was, now in pairs:
            assert torch.equal(now[:11], was)
            assert not now[11:].any()
        assert torch.equal(new[name][:11], old[name])
        assert torch.equal(new[name][12], old[name].mean(0))
    assert torch.equal(new["layers.0.weight"], old["layers.0.weight"])
    assert program.progress == saved.progress


def test_a_migrator_that_does_not_cover_all_of_it_leaves_the_gate_shut_and_the_rest_is_named(unreadable):
    program = grown(migrators=[GrownVocabulary(("embed.weight", "head.weight"), fields=("tokenizer",))])
    with (
        Checkpointer(unreadable, program.state) as checkpointer,
        nothing_done(program),
        pytest.raises(IncompatibleStateError) as caught,
    ):
        program.resume(checkpointer)
    assert caught.value.facts["count"] == 1
    assert "head.bias" in str(caught.value)
    assert "(covered by GrownVocabulary(embed.weight, head.weight))" in str(caught.value)


def test_steps_after_a_migration_are_compared_and_it_is_said_that_they_need_not_be_the_same(run_of):
    *_, report = resumed(grown(migrators=[MIGRATOR]), run_of(None))
    assert report.proof.verdict == "differs"
    assert "was migrated" in report.proof.table()


def test_who_reads_the_unreadable_run_fails(unreadable):
    """Else the gate's test would not show that nothing is read."""
    with Checkpointer(unreadable, Program().state) as checkpointer, pytest.raises(ResumeError, match="None of the 1"):
        checkpointer.resume()


@pytest.mark.parametrize("when", ["in a callback", "after the resume"])
def test_seeding_while_or_right_after_a_resume_is_undone_when_the_loop_begins(run_of, when):
    program = Program(seed=7)
    if when == "in a callback":
        program.callback.when_resumed = lambda: seed_all(3)
    steps = resumed(program, run_of(None))
    next(steps)
    if when == "after the resume":
        seed_all(3)
    assert next(steps).proof.is_proved


def resume_with_a_layer_more_on_one_rank(url):
    program = Program(seed=7, layers=2 if dist.get_rank() else 1)
    with (
        Checkpointer(url, program.state) as checkpointer,
        nothing_done(program),
        pytest.raises(IncompatibleStateError) as caught,
    ):
        program.resume(checkpointer)
    return str(caught.value), caught.value.facts["count"]


def save_on_each_rank(url):
    program = Program()
    with Checkpointer(url, program.state) as checkpointer:
        checkpointer.save()


def test_what_one_rank_builds_otherwise_is_refused_on_all_with_one_reason(gang, tmp_path):
    gang.values(2, save_on_each_rank, tmp_path / "run")
    one, other = gang.values(2, resume_with_a_layer_more_on_one_rank, tmp_path / "run")
    assert one == other
    assert one[1] == 2
    assert "layers.1.weight" in one[0]


def test_the_evidence_says_of_each_fault_what_catches_it():
    written = (Path(__file__).parents[2] / "EVIDENCE.md").read_text().splitlines()
    missing = [row for row in table() if row not in written]
    assert not missing, "\n".join(missing)


def table():
    """Return a row for each fault, as EVIDENCE.md has it."""
    ways = (("gate", GATE), ("check", CHECKS), ("proof", PROOF))
    return [
        f"| {each.fault} | {each.program} | {way}: {', '.join(f'`{name}`' for name in each.named)} |"
        for way, faults in ways
        for each in faults
    ]
