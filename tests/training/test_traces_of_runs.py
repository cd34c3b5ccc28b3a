"""Traces that a loop writes beside its saves."""

import threading
import time

from trainings import Training

from ckptstore import CheckpointStore
from ckptstore.events import UploadBegan
from ckptstore.training import Checkpointer


def test_a_trace_is_written_though_its_save_takes_longer_than_its_steps(tmp_path):
    may_upload = threading.Event()

    def hold(event):
        if isinstance(event, UploadBegan):
            may_upload.wait(30)

    training = Training()
    with Checkpointer(tmp_path / "run", training.state, every_steps=4, proof_steps=2, observer=hold) as checkpointer:
        training.train(7, checkpointer)
        may_upload.set()
        checkpointer.wait()
        loss, norm, ids = training.step(next(iter(training.loader)))
        checkpointer.observe(loss=loss, grad_norm=norm, batch_ids=ids)
        latest = CheckpointStore.open(tmp_path / "run").latest()
        deadline = time.monotonic() + 10
        while (trace := latest.trace()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [each["global_step"] for each in trace["observations"]] == [5, 6]
