"""A run that goes back to an older checkpoint leaves the newer ones behind, until somebody wants them back."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptstore import CheckpointStore, InvalidInputError
from ckptstore.training import Checkpointer, TrainingState, resume

sys.path.insert(0, str(Path(__file__).parent))
from small_language import Program


class Small:
    """A weight that says at which step, and on which line, it was saved."""

    def __init__(self, url, **options):
        self.model = nn.Linear(1, 1, bias=False)
        self.state = TrainingState(model=self.model)
        self.checkpointer = Checkpointer(url, self.state, background=False, **options)

    def save(self, step, value):
        self.model.weight.data.fill_(value)
        self.state.progress.global_step = step
        self.checkpointer.save()

    @property
    def value(self):
        return self.model.weight.item()


def begun(url, **options):
    """Return a run of three steps, 1.0 to 3.0, in the process that saved them."""
    run = Small(url, **options)
    for step in (1, 2, 3):
        run.save(step, float(step))
    return run


def names(url):
    return [f"{each.checkpoint_id}@{each.seq}" for each in CheckpointStore.open(url).checkpoints()]


@pytest.mark.parametrize("asked", [{"step": 1}, {"checkpoint_id": "step-1"}, {"seq": 2}], ids=str)
@pytest.mark.parametrize("how", ["in the same process", "in a new one"])
def test_what_is_newer_is_set_aside_and_what_is_saved_then_falls_back_behind_it(tmp_path, asked, how):
    url = str(tmp_path / "run")
    run = begun(url)
    if how == "in a new one":
        run = Small(url)
    first = names(url)[-1]
    seqs = [each.seq for each in CheckpointStore.open(url).checkpoints()]
    if "seq" in asked:
        asked = {"seq": seqs[-1]}
    report = run.checkpointer.resume(**asked)
    assert (run.value, report.global_step) == (1.0, 1)
    assert sorted(report.set_aside) == sorted([f"step-2@{seqs[1]}", f"step-3@{seqs[0]}"])
    assert names(url) == [first]
    assert "set aside       step-2@" in report.table()
    assert json.loads(json.dumps(report.as_json()))["set_aside"] == list(report.set_aside)
    run.save(2, 20.0)
    newest = CheckpointStore.open(url).latest()
    shards = sorted((Path(url) / "data").glob("*/step-2.*/*.safetensors"), key=lambda each: each.stat().st_mtime_ns)
    shards[-1].write_bytes(shards[-1].read_bytes()[:-1])
    again = Small(url)
    fallen = again.checkpointer.resume()
    assert (again.value, fallen.global_step) == (1.0, 1)
    assert [each.seq for each in fallen.passed_over] == [newest.seq]


def test_what_is_saved_after_going_back_is_another_incarnations(tmp_path):
    url = str(tmp_path / "run")
    run = begun(url)
    before = CheckpointStore.open(url).latest().commit
    run.checkpointer.resume(step=1)
    run.save(2, 20.0)
    after = CheckpointStore.open(url).latest().commit
    assert after.term > before.term


def test_restore_undoes_it(tmp_path):
    url = str(tmp_path / "run")
    run = begun(url)
    expected = names(url)
    for name in run.checkpointer.resume(step=1).set_aside:
        assert CheckpointStore.open(url).restore(name)
    assert names(url) == expected


def test_going_back_to_the_newest_sets_nothing_aside(tmp_path):
    url = str(tmp_path / "run")
    run = begun(url)
    expected = names(url)
    assert run.checkpointer.resume(step=3).set_aside == ()
    assert run.checkpointer.resume().set_aside == ()
    assert names(url) == expected


def test_the_run_does_not_go_back_to_what_is_set_aside_itself(tmp_path):
    url = str(tmp_path / "run")
    run = begun(url)
    name = max(run.checkpointer.resume(step=1).set_aside)
    with pytest.raises(InvalidInputError, match="is set aside") as refused:
        run.checkpointer.resume(seq=int(name.partition("@")[2]))
    assert f"ckptstore restore {url} {name}" in refused.value.hint
    assert run.value == 1.0


def test_a_save_that_is_under_way_when_the_run_goes_back_is_set_aside_too(tmp_path):
    url = str(tmp_path / "run")
    run = Small(url)
    run.save(1, 1.0)
    run.checkpointer = Checkpointer(url, run.state, background=True)
    run.save(2, 2.0)
    report = run.checkpointer.resume(step=1)
    assert [name.partition("@")[0] for name in report.set_aside] == ["step-2"]
    assert [each.global_step for each in CheckpointStore.open(url).checkpoints()] == [1]
    run.checkpointer.close()


def test_an_older_one_of_another_run_and_the_plain_function_set_nothing_aside(tmp_path):
    url = str(tmp_path / "run")
    begun(url)
    expected = names(url)
    other = Small(str(tmp_path / "other"))
    assert other.checkpointer.resume(source=url, step=1).set_aside == ()
    state = Small(url).state
    assert resume(state, url, step=1).global_step == 1
    assert names(url) == expected


def test_falling_back_behind_damage_sets_nothing_aside_and_what_is_saved_then_is_the_newest(tmp_path):
    url = str(tmp_path / "run")
    begun(url)
    damaged, *whole = names(url)
    (shard,) = (tmp_path / "run" / "data").glob("*/step-3.*/*.safetensors")
    body = shard.read_bytes()
    shard.write_bytes(body[:-1])
    run = Small(url)
    report = run.checkpointer.resume()
    assert (report.global_step, report.set_aside, report.steps_lost) == (2, (), 1)
    run.save(3, 30.0)
    newest, *older = names(url)
    assert (newest.partition("@")[0], older) == ("step-3", [damaged, *whole])
    shard.write_bytes(body)  # it was the network
    (shard,) = {*(tmp_path / "run" / "data").glob("*/step-3.*/*.safetensors")} - {shard}
    shard.write_bytes(shard.read_bytes()[:-1])
    again = Small(url)
    report = again.checkpointer.resume()
    assert (again.value, report.steps_lost) == (3.0, 0)


def back_on_ranks(url):
    run = begun(url)
    report = run.checkpointer.resume(step=1)
    dist.barrier()
    run.save(2, 20.0)
    return report.set_aside, [each.global_step for each in CheckpointStore.open(url).checkpoints()]


def test_all_ranks_go_back_together_and_save_on(gang, tmp_path):
    one, other = gang.values(2, back_on_ranks, str(tmp_path / "run"))
    assert one == other
    assert [name.partition("@")[0] for name in sorted(one[0], key=lambda name: int(name.partition("@")[2]))] == [
        "step-2",
        "step-3",
    ]
    assert one[1] == [2, 1]


def test_a_training_that_went_back_goes_on_as_it_did(tmp_path):
    program = Program()
    with Checkpointer(tmp_path / "run", program.state, proof_steps=2) as checkpointer:
        program.train(9, checkpointer, save_at=[(2, 0), (4, 0)])
    expected = {name: each.clone() for name, each in program.model.state_dict().items()}
    other = Program(seed=7)
    with Checkpointer(tmp_path / "run", other.state, proof_steps=2) as checkpointer:
        report = other.resume(checkpointer, step=2)
        other.train(9, checkpointer)
    assert report.proof.verdict == "proved"
    assert all(torch.equal(each, expected[name]) for name, each in other.model.state_dict().items())


def test_a_fingerprint_that_was_not_saved_is_said_to_be_not_compared(tmp_path):
    url = str(tmp_path / "run")
    begun(url)
    state = TrainingState(model=nn.Linear(1, 1, bias=False), fingerprints={"code": "v2"})
    report = Checkpointer(url, state).resume()
    assert report.unchecked == ("code",)
    assert "not compared    code: not saved" in report.table()
    assert report.as_json()["unchecked"] == ["code"]
