"""What was saved on several ranks is read by others: any safetensors reader, and a process that has no torch."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import torch
from case_samples import body_of, shards_under, writer
from states import bits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import storage_writers as sw
from ckptstore.format.shard import LEAF_TABLE_NAME
from ckptstore.objectstore.urls import open_store

VALUES = ("step",)


def save_model(root):
    """Train one step of a model sharded over all ranks, save it, and return every tensor of it as a whole."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(13, 9), nn.Linear(9, 7).to(torch.bfloat16))
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[1](model[0](torch.ones(2, 13)).to(torch.bfloat16)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    odd = {"spectrum": torch.randn(3, dtype=torch.complex128), "scalar": torch.tensor(7.5), "none": torch.empty(0, 3)}
    state = {"model": weights, "state": moments["state"], "odd": odd, "step": 1}
    sw.save(state, checkpoint_id="step-1", storage_writer=writer(root))
    whole = {f"model.{name}": tensor for name, tensor in weights.items()} | {f"odd.{n}": t for n, t in odd.items()}
    for name, parts in moments["state"].items():
        whole |= {f"state.{name}.{part}": tensor for part, tensor in parts.items()}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in whole.items()}


def read_by_safetensors(path):
    """Return the tensors of a shard: by name, where they begin, and themselves."""
    found = {}
    with safetensors.safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  (it is no mapping)
            name, _, offsets = key.partition("@")
            start = tuple(int(each) for each in offsets.split(",")) if offsets else None
            found[name, start] = file.get_tensor(key)
    return found


def test_every_shard_opens_with_safetensors_and_holds_the_slices_of_the_source(gang, root, tmp_path):
    whole = gang.values(4, save_model, root)[0]
    keys = shards_under(root)
    assert len(keys) == 4
    left = {name: np.zeros(tuple(tensor.shape), np.int64) for name, tensor in whole.items()}
    for number, key in enumerate(keys):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(body_of(open_store(root), key))
        for (name, start), tensor in read_by_safetensors(path).items():
            if name in VALUES or name == LEAF_TABLE_NAME:
                continue
            source = whole[name]
            origin = start or (0,) * source.dim()
            box = tuple(slice(at, at + n) for at, n in zip(origin, tensor.shape[: source.dim()], strict=True))
            # safetensors has no name for complex128: each element comes as its sixteen bytes
            assert tensor.dtype == (torch.uint8 if source.dtype is torch.complex128 else source.dtype), name
            assert bits(tensor) == bits(source[box] if box else source), name
            left[name][box] += 1
    assert [name for name, counted in left.items() if (counted != 1).any()] == []


WITHOUT_TORCH = """
import importlib.abc, json, sys

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors"):
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, Refusing())
try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit("torch could be imported")

from ckptstore import CheckpointStore

checkpoint = CheckpointStore.open(sys.argv[1]).latest()
found = checkpoint.read(sys.argv[2])
part = checkpoint.read(sys.argv[2], [slice(2, 5)])
print(json.dumps([checkpoint.saved_world_size, str(found.dtype), found.tobytes().hex(), part.tobytes().hex()]))
"""


@pytest.mark.parametrize("name", ["model.0.weight", "model.1.weight"])
def test_one_tensor_of_four_ranks_is_read_by_a_process_in_which_torch_cannot_be_imported(gang, root, name):
    whole = gang.values(4, save_model, root)[0]
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, root, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    dtype = re.sub("torch.", "", str(whole[name].dtype))
    assert json.loads(ended.stdout) == [4, dtype, bits(whole[name]).hex(), bits(whole[name][2:5]).hex()]
