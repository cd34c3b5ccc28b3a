"""Verifying takes the memory that it was given, and no more than a constant beside it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ckptstore.units import MIB

BESIDE_MIB = 16
"""What a process takes beside the budget while it verifies: threads, what the parts say, pages not yet given back."""

PROGRAM = """
import json, resource, sys
import numpy as np
from ckptstore import CheckpointStore
from ckptstore.cli.sharing import transfer_of
from ckptstore.format.shard import Chunk, StoredShard, TensorMeta, lay_out
from ckptstore.objectstore.urls import open_store
from ckptstore.options import TransferOptions
from ckptstore.protocol.attempt import begin
from ckptstore.protocol.claim import Incarnation
from ckptstore.protocol.commit import commit
from ckptstore.protocol.log import RunLog
from ckptstore.transfer.upload import upload_shard

url, act, mib, threads, memory = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
if act == "save":
    log, job = RunLog.create(open_store(url)), Incarnation.new(job="big")
    attempt, stored, nbytes = begin(log, job, checkpoint_id="big", world_size=2), [], 16 << 20
    body = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tobytes()
    for rank in (0, 1):
        chunks = [Chunk(TensorMeta(f"t{i}", "uint8", (2 * nbytes,)), (rank * nbytes,), (nbytes,), nbytes)
                  for i in range(mib // 32)]
        layout = lay_out(chunks)
        shard = upload_shard(log.store, attempt.stem.shard_key(rank), layout, [[body] for _ in chunks], rank=rank,
                             options=TransferOptions())
        stored.append(StoredShard(shard, layout.items))
    commit(log, job, attempt, stored)
else:
    store = CheckpointStore.open(url, transfer=transfer_of(memory=memory, threads=threads))
    checkpoint = store.latest()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    verdict = store.verify(checkpoint, level="full")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([verdict.ok, verdict.bytes_read, (after - before) * 1024]))
"""


def run_here(*arguments):
    """Run the program in a process of its own, which alone can tell its peak memory; through a small one in between.

    A process begins with the peak of whoever started it.
    """
    between = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    words = [sys.executable, "-S", "-c", between, sys.executable, "-c", PROGRAM, *map(str, arguments)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads(ended.stdout) if ended.stdout else None


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    url = tmp_path_factory.mktemp("large") / "run"
    run_here(url, "save", 256, 1, "64M")
    yield str(url)
    for path in url.rglob("*.safetensors"):
        path.unlink()  # pytest would keep them


@pytest.mark.parametrize(("threads", "memory"), [(1, "8M"), (4, "16M"), (16, "24M")])
def test_a_large_checkpoint_is_verified_within_the_memory_that_was_given(large, threads, memory):
    ok, read, grown = run_here(large, "verify", 0, threads, memory)
    assert ok
    assert read > 256 * MIB
    assert grown < (int(memory[:-1]) + BESIDE_MIB) * MIB
