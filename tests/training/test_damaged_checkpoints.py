"""A damaged checkpoint is passed over for the one before it, with the reason; one that was asked for is refused."""

from __future__ import annotations

import json
import math
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptstore import (
    CheckpointStore,
    IncompatibleStateError,
    IntegrityError,
    NotFoundError,
    ResumeError,
    TransferOptions,
)
from ckptstore.training import Checkpointer, TrainingState

sys.path.insert(0, str(Path(__file__).parent))
from small_language import Program

SAVED = (2, 4, 6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the root of a run of three checkpoints, and the program that went on."""
    root = tmp_path_factory.mktemp("run") / "run"
    program = Program()
    with Checkpointer(root, program.state, proof_steps=2) as checkpointer:
        program.train(9, checkpointer, save_at=[(step, 0) for step in SAVED])
    return root, program


@pytest.fixture
def copied(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    return tmp_path / "run"


def only(root, pattern):
    (path,) = root.glob(pattern)
    return path


def flip(path, at):
    body = bytearray(path.read_bytes())
    body[at] ^= 1
    path.write_bytes(bytes(body))


def place_of(shard, name):
    """Return where the bytes of a key begin in a shard."""
    body = shard.read_bytes()
    (length,) = struct.unpack("<Q", body[:8])
    header = json.loads(body[8 : 8 + length])
    (found,) = (key for key in header if key.partition("@")[0] == name)
    return 8 + length + header[found]["data_offsets"][0]


def flip_in(name):
    """Return what flips a bit of one key's bytes."""

    def damage(folder):
        shard = only(folder, "*.safetensors")
        flip(shard, place_of(shard, name))

    return damage


def cut(folder):
    shard = only(folder, "*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])


DAMAGE = {
    "a bit of a weight": (flip_in("model.head.weight"), "model.head.weight"),
    "a bit of a moment": (flip_in("optimizer.embed.weight.exp_avg"), "optimizer.embed.weight.exp_avg"),
    "a bit of the progress": (flip_in("values/progress"), "values/progress"),
    "a bit of an optimizer's groups": (flip_in("values/optimizer"), "values/optimizer"),
    "a bit of a generator's state": (flip_in("ranks/00000/rng"), "ranks/00000/rng"),
    "a bit of a loader's place": (flip_in("ranks/00000/loader.callback"), "ranks/00000/loader.callback"),
    "a bit of a shard's header": (lambda folder: flip(only(folder, "*.safetensors"), 20), "rank-00000.safetensors"),
    "a shard that is short": (cut, "rank-00000.safetensors"),
    "no shard": (lambda folder: only(folder, "*.safetensors").unlink(), "rank-00000.safetensors"),
    "a bit of the manifest": (lambda folder: flip(only(folder, "part-*"), 60), "part-00000.json.gz"),
    "no manifest": (lambda folder: only(folder, "part-*").unlink(), "part-00000.json.gz"),
    "a bit behind the fingerprints": (lambda folder: flip(only(folder, "finger*"), 60), "fingerprints.json.gz"),
    "nothing behind the fingerprints": (lambda folder: only(folder, "finger*").unlink(), "fingerprints.json.gz"),
}


def damage(root, what, *steps):
    for step in steps:
        DAMAGE[what][0](only(root, f"data/0/step-{step}.*"))


def everything(program):
    return {
        "weights": {name: each.tolist() for name, each in program.model.state_dict().items()},
        "optimizer": repr(program.opt.state_dict()),
        "scheduler": program.scheduler.state_dict(),
        "scaler": program.scaler.state_dict(),
        "sampler": program.sampler.state_dict(),
        "progress": program.progress.as_json(),
        "callback": program.callback.state_dict(),
        "torch": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("level", ["exists", "full"])
@pytest.mark.parametrize("what", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_is_resumed_and_it_is_said_why(run, copied, what, level):
    damage(copied, what, 6)
    program = Program(seed=7)
    with Checkpointer(copied, program.state, proof_steps=2) as checkpointer:
        report = checkpointer.resume(level=level)
        assert (report.checkpoint_id, report.global_step, report.steps_lost) == ("step-4", 4, 2)
        (passed,) = report.passed_over
        assert (passed.checkpoint_id, passed.seq, passed.global_step) == ("step-6", 3, 6)
        assert DAMAGE[what][1] in passed.reason
        program.train(9, checkpointer)
    control = run[1]
    assert everything(program)["weights"] == everything(control)["weights"]
    assert (program.progress, program.sampler.state_dict()) == (control.progress, control.sampler.state_dict())
    assert report.proof.verdict == "proved"
    assert f"passed over     step-6 (seq 3): {passed.reason}\nsteps lost      2\n" in report.table()


def test_two_damaged_ones_are_passed_over_and_every_reason_is_told(copied):
    damage(copied, "a bit of a weight", 6)
    damage(copied, "no shard", 4)
    program = Program(seed=7)
    with Checkpointer(copied, program.state) as checkpointer:
        report = checkpointer.resume()
    assert (report.checkpoint_id, report.steps_lost) == ("step-2", 4)
    assert [each.checkpoint_id for each in report.passed_over] == ["step-6", "step-4"]
    assert [each["reason"] for each in report.as_json()["passed_over"]] == [each.reason for each in report.passed_over]
    assert "model.head.weight" in report.passed_over[0].reason
    assert "rank-00000.safetensors" in report.passed_over[1].reason


@pytest.mark.parametrize("asked", [{"step": 6}, {"checkpoint_id": "step-6"}, {"seq": 3}], ids=str)
@pytest.mark.parametrize(("what", "level"), [("a bit of the progress", "exists"), ("a bit of a weight", "full")])
def test_a_damaged_one_that_was_asked_for_is_refused_and_nothing_is_changed(copied, asked, what, level):
    damage(copied, what, 6)
    program = Program(seed=7)
    before = everything(program)
    with Checkpointer(copied, program.state) as checkpointer:
        with pytest.raises(IntegrityError, match=r"is damaged|values/progress"):
            checkpointer.resume(**asked, level=level)
        assert everything(program) == before
        assert checkpointer.resume(step=4).global_step == 4


def large(seed):
    model = nn.ParameterDict({name: nn.Parameter(torch.full((1_500_000,), float(seed))) for name in ("a", "z")})
    return model, TrainingState(model=model)


@pytest.mark.parametrize("asked", [{"step": 0}, {}], ids=["one is asked for", "it is the only one"])
def test_where_damage_is_found_only_after_tensors_were_filled_it_is_said_so(tmp_path, asked):
    with Checkpointer(tmp_path / "run", large(1)[1], background=False) as checkpointer:
        checkpointer.save()
    shard = only(tmp_path, "run/data/0/*/*.safetensors")
    flip(shard, place_of(shard, "model.z") + 5_900_000)
    model, state = large(2)
    transfer = TransferOptions(fetches_in_flight=1, fetch_bytes=1 << 20)
    with Checkpointer(tmp_path / "run", state, transfer=transfer) as checkpointer:
        with pytest.raises(IntegrityError if asked else ResumeError, match="mixture") as caught:
            checkpointer.resume(**asked)
        assert caught.value.facts["untouched"] is False
        assert (model["a"][0].item(), model["z"][-1].item()) == (1.0, 2.0)
        model["a"].data.fill_(2.0)
        with pytest.raises(IntegrityError if asked else ResumeError) as caught:
            checkpointer.resume(**asked, level="full")
    assert "mixture" not in caught.value.message
    assert {*model["a"].tolist(), *model["z"][-1:].tolist()} == {2.0}


def test_where_an_older_one_is_refused_after_a_damaged_one_was_loaded_the_mixture_is_named(tmp_path):
    for step, data in ((1, "old"), (2, "new")):
        state = TrainingState(model=large(step)[0], fingerprints={"data": data})
        state.progress.global_step = step
        with Checkpointer(tmp_path / "run", state, background=False) as checkpointer:
            checkpointer.save()
    shard = only(tmp_path, "run/data/0/step-2.*/*.safetensors")
    flip(shard, place_of(shard, "model.z") + 5_900_000)
    model = large(5)[0]
    state = TrainingState(model=model, fingerprints={"data": "new"})
    transfer = TransferOptions(fetches_in_flight=1, fetch_bytes=1 << 20)
    with Checkpointer(tmp_path / "run", state, transfer=transfer) as checkpointer:
        with pytest.raises(IncompatibleStateError, match="may hold tensors of step-2") as caught:
            checkpointer.resume()
        assert "allow=['data']" in caught.value.hint
        assert (caught.value.facts["untouched"], caught.value.facts["damaged"]) == (False, ["step-2"])
        assert model["a"][0].item() == 2.0
        with pytest.raises(IncompatibleStateError) as caught:
            checkpointer.resume(level="full")
    assert "may hold" not in caught.value.message


@pytest.mark.parametrize("what", ["a bit of the progress", "no shard", "a bit of a moment"])
def test_where_none_is_whole_the_resume_fails_and_the_state_is_what_it_was(copied, what):
    damage(copied, what, *SAVED)
    program = Program(seed=7)
    before = everything(program)
    with Checkpointer(copied, program.state) as checkpointer, pytest.raises(ResumeError) as caught:
        checkpointer.resume()
    assert caught.value.facts["damaged"] == ["step-6", "step-4", "step-2"]
    assert "None of the 3 checkpoints" in caught.value.message
    assert DAMAGE[what][1] in caught.value.message
    assert f"ckptstore verify {CheckpointStore.open(copied).url} --all --level full" in caught.value.hint
    assert caught.value.facts["untouched"] is True
    assert everything(program) == before


def test_a_run_goes_on_from_the_older_one_and_the_next_resume_finds_what_it_saved(copied):
    damage(copied, "a bit of a weight", 6)
    program = Program(seed=7)
    with Checkpointer(copied, program.state) as checkpointer:
        program.resume(checkpointer)
        program.train(5, checkpointer, save_at=[(5, 0)])
    again = Program(seed=8)
    with Checkpointer(copied, again.state) as checkpointer:
        report = checkpointer.resume()
    assert (report.checkpoint_id, report.passed_over, report.steps_lost) == ("step-5", (), 0)


@pytest.mark.parametrize("what", ["a flipped bit", "no trace", "another checkpoint's"])
def test_without_a_trace_that_is_whole_a_resume_is_as_good_and_nothing_is_proved(copied, what):
    trace = only(copied, "data/0/step-6.*/trace.json")
    if what == "a flipped bit":
        flip(trace, 100)
    elif what == "no trace":
        trace.unlink()
    else:
        trace.write_bytes(only(copied, "data/0/step-4.*/trace.json").read_bytes())
    program = Program(seed=7)
    with Checkpointer(copied, program.state, proof_steps=2) as checkpointer:
        report = checkpointer.resume(level="full")
        assert (report.checkpoint_id, report.passed_over) == ("step-6", ())
        program.train(9, checkpointer)
    assert report.proof.verdict == "no_trace"
    assert report.table().endswith("no_trace")
    assert CheckpointStore.open(copied).get("step-6").proved is None


def test_a_log_that_is_damaged_decides_nothing(copied):
    flip(copied / "log" / "000000000003.json", 100)
    program = Program(seed=7)
    before = everything(program)
    with Checkpointer(copied, program.state) as checkpointer, pytest.raises(IntegrityError, match="000000000003"):
        checkpointer.resume()
    assert everything(program) == before


def test_what_is_not_there_is_not_found(copied):
    with Checkpointer(copied, Program(seed=7).state) as checkpointer, pytest.raises(NotFoundError, match="5"):
        checkpointer.resume(step=5)


def test_where_nothing_is_committed_the_start_is_fresh_and_the_report_says_so(tmp_path):
    with Checkpointer(tmp_path / "run", Program().state) as checkpointer:
        report = checkpointer.resume()
    assert report.is_fresh
    assert report.table() == "A fresh start: nothing is committed yet."
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["is_fresh"] is True


def test_a_report_is_json_also_where_numbers_are_not_finite(copied):
    program = Program(seed=7)
    with Checkpointer(copied, program.state, proof_steps=2) as checkpointer:
        report = program.resume(checkpointer, step=6)
        program.progress.global_step = 7
        checkpointer.observe(loss=math.nan, grad_norm=math.inf, batch_ids=[])
    said = json.loads(json.dumps(report.as_json(), allow_nan=False))
    rows = {row["quantity"]: row for row in said["proof"]["rows"]}
    assert (rows["loss"]["resumed"], rows["grad_norm"]["resumed"]) == ("NaN", "Infinity")
    assert (said["proof"]["verdict"], said["proof"]["resume_loss_delta"]) == ("differs", "NaN")
    assert said["restored"] == list(report.restored)
    assert said.keys() == {*type(report).__dataclass_fields__}


def sharded(seed):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = nn.Linear(6, 4, bias=False)
    whole = seed * torch.arange(24.0).view(4, 6)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    return model, TrainingState(model=model, extras={"seed": seed})


def save_on_ranks(url):
    for seed in (1, 2):
        _, state = sharded(seed)
        state.progress.global_step = seed
        with Checkpointer(url, state) as checkpointer:
            checkpointer.save()


def resume_on_ranks(url):
    model, state = sharded(5)
    with Checkpointer(url, state) as checkpointer:
        report = checkpointer.resume()
    return report.checkpoint_id, report.passed_over, report.steps_lost, model.weight.full_tensor()[3, 5].item()


@pytest.mark.parametrize("what", ["model.weight", "ranks/00001/rng", "no shard"])
def test_damage_that_one_rank_meets_lets_all_ranks_fall_back_alike(gang, tmp_path, what):
    gang.values(2, save_on_ranks, tmp_path / "run")
    shard = only(tmp_path, "run/data/*/step-2.*/rank-00001.safetensors")
    if what == "no shard":
        shard.unlink()
    else:
        flip(shard, place_of(shard, what))
    one, other = gang.values(2, resume_on_ranks, tmp_path / "run")
    for name, passed_over, steps_lost, last in (one, other):
        assert (name, steps_lost, last) == ("step-1", 1, 23.0)
        assert [each.checkpoint_id for each in passed_over] == ["step-2"]
