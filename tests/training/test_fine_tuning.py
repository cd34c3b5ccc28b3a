"""Runs that begin with the weights of another one."""

import os
import signal

import pytest
import torch
from torch import nn
from trainings import equal, weights

from ckptstore import CheckpointStore
from ckptstore.errors import IncompatibleStateError
from ckptstore.training import AddedParameters, Checkpointer, Progress, TrainingState
from examples.finetune_lora import STEPS, adapted, tune
from examples.train_plain import network


def base_at(url):
    """Save a run with moments and a trace, and return its weights."""
    torch.manual_seed(7)
    model, progress = network(), Progress()
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(
        model=model,
        optimizer=optimizer,
        progress=progress,
        fingerprints={"data": {"of": "waves"}},
        precision={"autocast": torch.bfloat16},
    )
    with Checkpointer(url, state, background=False, proof_steps=1) as checkpointer:
        for step in range(4):
            loss = model(torch.ones(1, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.global_step += 1
            checkpointer.observe(loss=loss)
            if step == 2:
                checkpointer.save()
                saved = weights(model)
    assert CheckpointStore.open(url).latest().trace() is not None
    return saved


def tuned(source, url, killed_at=None):
    """Fine-tune with the example, and return where it began, its losses, and its weights."""
    losses = {}

    def note(step, loss):
        losses[step] = loss
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    report, model = tune(source, url, on_step=note)
    return (report.url, report.global_step), losses, weights(model), (report.migrated, report.proof.verdict)


def test_adapters_are_tuned_on_a_frozen_base_of_another_run_and_go_on_where_they_were_killed(gang, tmp_path):
    source, url = f"file://{tmp_path}/base", f"file://{tmp_path}/run"
    base = base_at(source)
    log = CheckpointStore.open(source).latest().seq
    began, losses, at_end, (migrated, verdict) = tuned(source, str(tmp_path / "control"))
    assert (began, verdict, len(migrated)) == ((source, 3), "no_trace", 4)
    assert list(losses) == list(range(1, STEPS + 1))

    assert gang.run(1, tuned, source, url, 27)[0].died
    ((begun, after, resumed, (migrated, _)),) = gang.values(1, tuned, source, url)
    assert (begun[0], migrated) == (url, ())
    assert begun[1] in (10, 20)
    assert after == {step: losses[step] for step in range(begun[1] + 1, STEPS + 1)}
    assert equal(resumed, at_end)
    assert equal({name: resumed[name] for name in base}, base)
    assert resumed["3.lora_b"].any()
    assert CheckpointStore.open(source).latest().seq == log
    assert CheckpointStore.open(source).latest().proved is None


def test_parameters_that_nobody_speaks_of_are_refused(tmp_path):
    base_at(tmp_path / "base")
    model = adapted()
    for named in ((), ("lora_a",)):
        migrators = [AddedParameters(named)] if named else []
        checkpointer = Checkpointer(tmp_path / "run", TrainingState(model=model, migrators=migrators))
        before = weights(model)
        with pytest.raises(IncompatibleStateError, match=r"0\.lora_b: absent → ") as refused:
            checkpointer.resume(source=tmp_path / "base", only=("model",))
        assert "pass a Migrator" in refused.value.hint
        assert equal(weights(model), before)


def test_what_was_saved_and_has_no_place_is_refused_though_something_was_added(tmp_path):
    base_at(tmp_path / "base")
    model = nn.Sequential(adapted()[0])
    checkpointer = Checkpointer(tmp_path / "run", TrainingState(model=model, migrators=[AddedParameters(("0",))]))
    with pytest.raises(IncompatibleStateError, match=r"3\.weight"):
        checkpointer.resume(source=tmp_path / "base", only=("model",))
