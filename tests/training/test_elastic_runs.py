"""Runs that are killed, and go on with the same or another number of ranks."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from examples import train_ddp, train_elastic
from examples.train_elastic import BATCH, EPOCHS, SAMPLES

STEPS = EPOCHS * -(-SAMPLES // BATCH)


def trained(example, url, notes, killed_at):
    """Train with an example, note every step on disk, and die on every rank after one of them."""
    with Path(notes).joinpath(f"{killed_at}-{dist.get_rank()}").open("w") as file:

        def note(step, *seen):
            file.write(json.dumps([step, *seen]) + "\n")
            if step == killed_at:
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)

        report = {"ddp": train_ddp, "elastic": train_elastic}[example].train(url, on_step=note)
    assert report.is_fresh or report.proof.verdict in ("proved", "no_trace")  # killed before it was written
    return report.global_step


def noted(folder, killed_at, rank):
    """Return what was noted by step."""
    lines = (folder / f"{killed_at}-{rank}").read_text().splitlines()
    return {step: seen for step, *seen in map(json.loads, lines)}


def test_ddp_goes_on_bit_by_bit_with_a_rank_that_has_no_sample_at_an_epochs_end(gang, tmp_path):
    gang.values(2, trained, "ddp", str(tmp_path / "control"), str(tmp_path), None)
    control = noted(tmp_path, None, 0)
    assert list(control) == list(range(1, 33))
    assert all(end.died for end in gang.run(2, trained, "ddp", str(tmp_path / "run"), str(tmp_path), 23))
    (begun,) = set(gang.values(2, trained, "ddp", str(tmp_path / "run"), str(tmp_path), 99))
    assert begun in (15, 20)
    assert noted(tmp_path, 99, 0) == {step: control[step] for step in range(begun + 1, 33)}


def test_4_then_3_then_5_then_4_ranks_train_every_sample_once_and_as_one_run_does(gang, tmp_path):
    gang.values(1, trained, "elastic", str(tmp_path / "control"), str(tmp_path), None)
    control = noted(tmp_path, None, 0)
    assert list(control) == list(range(1, STEPS + 1))

    samples, begun = {}, []
    for ranks, killed_at in ((4, 67), (3, 155), (5, 249), (4, STEPS + 1)):
        ends = gang.run(ranks, trained, "elastic", str(tmp_path / "run"), str(tmp_path), killed_at)
        assert [end.died for end in ends] == [killed_at <= STEPS] * ranks
        seen = [noted(tmp_path, killed_at, rank) for rank in range(ranks)]
        begun.append(min(seen[0]) - 1)
        for step, (loss, _) in seen[0].items():
            assert loss == pytest.approx(control[step][0], rel=1e-4)
            samples[step] = [each for share in seen for each in share[step][1]]  # in place of those that were lost
    assert [end.value for end in ends] == [begun[-1]] * 4
    assert begun == sorted(set(begun))
    assert all(at % 20 == 0 for at in begun)

    assert samples.keys() == control.keys()
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS // EPOCHS + 1, (epoch + 1) * STEPS // EPOCHS + 1)
        assert Counter(each for step in steps for each in samples[step]) == Counter(range(SAMPLES))
    assert all(sorted(ids) == sorted(control[step][1]) for step, ids in samples.items())
