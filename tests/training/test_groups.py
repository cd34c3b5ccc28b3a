"""Groups of our own end with torch's, and no thread of theirs is at work when the process ends."""

import gc
import threading
import time
import weakref

import torch
import torch.distributed as dist

from ckptstore.training import Checkpointer, Progress, TrainingState, groups
from storage_writers import ranks


def end_of_a_training(url):
    """Train and end as a script does; return whether a group of ours outlived torch's."""
    model = torch.nn.Linear(2, 2)
    state = TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), progress=Progress())
    with Checkpointer(url, state) as checkpointer:
        checkpointer.resume()
        state.progress.global_step = 1
        checkpointer.save()
    known = [*(group for _, group in groups._made.values()), ranks._background_group[1]]
    made = [group for group in known if group() is not None]  # others are of trainings that were here before
    assert len(made) >= 2
    del checkpointer
    gc.collect()
    default = weakref.ref(dist.distributed_c10d._get_default_group())
    dist.destroy_process_group()
    return [group() is None for group in [default, *made]]


def test_what_torch_lets_go_of_ends_with_it(gang, tmp_path):
    for ended in gang.values(2, end_of_a_training, str(tmp_path / "run")):
        assert all(ended)


def test_the_end_of_the_process_waits_until_what_was_added_up_is_let_go_of(monkeypatch):
    numbers = torch.zeros(4)
    held = [numbers.view(-1)]
    monkeypatch.setattr(groups, "_last", [numbers])
    monkeypatch.setattr(groups, "SETTLE_SECONDS", 30.0)
    assert groups._is_held(numbers)
    letting_go = threading.Timer(0.1, held.clear)
    letting_go.start()
    began = time.monotonic()
    groups._settle()
    assert 0.09 < time.monotonic() - began < groups.SETTLE_SECONDS
    assert not groups._is_held(numbers)
    letting_go.join()


def test_but_not_for_ever(monkeypatch):
    numbers = torch.zeros(4)
    held = numbers.view(-1)
    monkeypatch.setattr(groups, "_last", [numbers])
    monkeypatch.setattr(groups, "SETTLE_SECONDS", 0.05)
    groups._settle()
    assert held.numel() == 4
