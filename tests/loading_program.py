"""A training whose samples come from workers, as a program: `python loading_program.py URL`. It says its steps."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from trainings import Training

from ckptstore.training import Checkpointer

if __name__ == "__main__":
    training = Training(workers=2)
    with Checkpointer(sys.argv[1], training.state, every_steps=5, stop_seconds=20) as checkpointer:
        checkpointer.resume()
        while training.progress.epoch < 100:
            for batch in training.loader:
                loss, norm, ids = training.step(batch)
                sys.stdout.write(f"step {training.progress.global_step}\n")
                sys.stdout.flush()
                time.sleep(0.3)
                checkpointer.observe(loss=loss, grad_norm=norm, batch_ids=ids)
                if checkpointer.due():
                    checkpointer.save()
