"""A sharded state, the jobs of its ranks, and the program as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist
from states import blank, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import storage_writers as sw
from ckptstore.cli.app import app
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.capable import PROBED, place_of
from ckptstore.testing.tapped import TappedStore

SHAPES = {"w": (9, 7000), "uneven": (7, 5), "few": (2, 3), "half": (6, 4)}


def tensors(seed):
    """Return the same whole tensors in every process. `w` has several leaves on each of three ranks."""
    generator = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return whole | {"half": whole["half"].to(torch.bfloat16)}


def unsharded(seed):
    """Return what `sharded(seed)` is, in one process."""
    return {"model": tensors(seed), "plain": torch.full((3,), float(seed)), "step": seed, "note": ("seed", seed)}


def sharded(seed):
    """Return a state whose model lies in pieces on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors(seed).items()}
    return unsharded(seed) | {"model": model}


def writer(root, **options):
    """Return a writer that does not ask the store what it can do.

    The conformance suite asks this server, which takes seconds over eight creates that race.
    """
    made = sw.CkptStoreWriter(root, **options)
    PROBED.add(place_of(made._store))
    return made


def save(url, name, seed):
    """Save as one of several ranks."""
    sw.save(sharded(seed), checkpoint_id=name, storage_writer=writer(url))


def load(url, seed, name=None):
    """Load as one of several ranks, and say whether it is `sharded(seed)`."""
    wanted = sharded(seed)
    target = blank(wanted)
    sw.load(target, checkpoint_id=name, storage_reader=sw.CkptStoreReader(url))
    return same(target, wanted)


def loaded_here(url, **which):
    """Return what a load in this process gives."""
    target = blank(unsharded(0))
    sw.load(target, storage_reader=sw.CkptStoreReader(url, **which))
    return target


def tapped(url, tap):
    """Return a store that shows every call to `tap` before it happens."""
    return TappedStore(open_store(url), tap)


def die():
    """Kill this process as an out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def shards_under(url):
    """Return the keys of all shards."""
    return [info.key for info in open_store(url).list("data/") if info.key.endswith(".safetensors")]


def body_of(store, key):
    return store.get(key, max_bytes=1 << 30)


def command(*arguments, code=0):
    """Run the program as a process and return the JSON that it prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "ckptstore.cli", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    return json.loads(ended.stdout)


def command_here(capsys, *arguments):
    """Run the program's function in this process; return its exit code and the JSON that it prints."""
    capsys.readouterr()
    code = app([*map(str, arguments), "--json"], standalone_mode=False)
    return code, json.loads(capsys.readouterr().out)
