"""A save of several ranks: on which group, what each says, and what is wrong on one of them is raised on all."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptstore import CheckpointStore
from ckptstore.errors import InvalidInputError
from ckptstore.training import Checkpointer, TrainingState


def state(**more):
    torch.manual_seed(1)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return TrainingState(model=model, optimizer=optimizer, **more)


def save_on(url, members, background):
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    made = state()
    with Checkpointer(url, made, process_group=group, background=background, proof_steps=0) as checkpointer:
        own = checkpointer.writer.process_group
        assert dist.get_process_group_ranks(own) == members
        sums = []
        for _ in range(3):
            made.progress.global_step += 1
            checkpointer.save()
            for each in range(20):
                added = torch.ones(()) * each
                dist.all_reduce(added, group=group)
                sums.append(added.item())
        checkpointer.wait()
        groups = [group, own, checkpointer._meeting.group]
    return sums, len({id(each) for each in groups})


@pytest.mark.parametrize(("ranks", "members", "background"), [(2, [0, 1], True), (3, [1, 2], True), (3, [1, 2], False)])
def test_saves_have_a_group_of_their_own_beside_the_one_that_trains(gang, tmp_path, ranks, members, background):
    url = str(tmp_path / "run")
    found = gang.values(ranks, save_on, url, members, background)
    assert [each for each in found if each is not None] == [([2.0 * each for each in range(20)] * 3, 3)] * 2
    assert [each.global_step for each in CheckpointStore.open(url).checkpoints()] == [3, 2, 1]


def save_badly(url, folder):
    rank = dist.get_rank()
    raised = []
    wrong = {
        "metrics": (state(), {"metrics": {"loss": "low" if rank else 1.0}}),
        "parallelism": (state(parallelism={"dp": 2 + rank}), {}),
        "fingerprints": (state(fingerprints={"config": Path(folder) / f"no-{rank}"}), {}),
    }
    for made, said in wrong.values():
        with Checkpointer(url, made, proof_steps=0) as checkpointer:
            try:
                checkpointer.save(**said)
            except InvalidInputError as error:
                raised.append((error.message, error.facts.get("rank")))
    made = state(fingerprints={"config": Path(folder) / f"yes-{rank}"})
    with Checkpointer(url, made, proof_steps=0) as checkpointer:
        checkpointer.save()
    return raised


def test_what_is_wrong_on_one_rank_is_raised_on_all_and_only_rank_0_reads_files(gang, tmp_path):
    (tmp_path / "yes-0").write_text("a")
    url = str(tmp_path / "run")
    first, second = gang.values(2, save_badly, url, str(tmp_path))
    assert first == second
    assert [rank for _, rank in first] == [1, 1, 0]
    assert "loss" in first[0][0]
    assert "ranks train" in first[1][0]
    assert "no-0" in first[2][0]
    assert list(CheckpointStore.open(url).latest().commit.fingerprints) == ["config"]
