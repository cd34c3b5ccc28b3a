"""What an object of the user's raises in a resume is told with its name, and that the state is a mixture by then."""

import pytest
import torch
from torch import nn

from ckptstore.errors import ResumeError
from ckptstore.training import Checkpointer, TrainingState


class Average:
    def __init__(self, depth):
        self.values = [0.0] * depth

    def state_dict(self):
        return {"values": list(self.values)}

    def load_state_dict(self, state):
        if len(state["values"]) != len(self.values):
            raise ValueError("other depth")
        self.values = state["values"]


def made(depth):
    model = nn.Linear(2, 2)
    return model, TrainingState(model=model, ema=Average(depth))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_refuses_its_state_is_named_and_the_mixture_is_told(tmp_path):
    _, state = made(2)
    with Checkpointer(tmp_path, state, background=False) as checkpointer:
        checkpointer.save()
    other, state = made(3)
    before = other.weight.clone()
    with pytest.raises(ResumeError, match="ema does not take what was saved: ValueError: other depth") as raised:
        Checkpointer(tmp_path, state).resume()
    assert raised.value.facts["component"] == "ema"
    assert raised.value.facts["untouched"] is False
    assert not torch.equal(other.weight, before)
