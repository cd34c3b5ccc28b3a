"""A training run, saved whole and resumed on any world size: what to save, when, and the proof that it went on.

```python
from ckptstore.training import Checkpointer, Keep, Progress, TrainingState

state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, progress=progress)
with Checkpointer("s3://bucket/runs/llama-7b", state, every_steps=500, keep=Keep(last=3)) as ckpt:
    report = ckpt.resume()
    for batch in loader:
        ...
        ckpt.observe(loss=loss, grad_norm=norm, batch_ids=ids)
        if ckpt.due():
            ckpt.save(metrics={"val_loss": v})
```
"""

from ckptstore.events import KeepFailed, ProofEnded, Resumed, Stopping, TraceFailed
from ckptstore.maintenance.retention import Keep
from ckptstore.training.calls import resume, save
from ckptstore.training.checkpointer import Checkpointer
from ckptstore.training.compat import Matrix
from ckptstore.training.differences import ABSENT, Difference
from ckptstore.training.fingerprints import Fingerprint, fingerprint
from ckptstore.training.loaders import Collate, PerRank
from ckptstore.training.migrate import AddedParameters, GrownVocabulary, Migrator
from ckptstore.training.progress import Progress
from ckptstore.training.proof import Proof
from ckptstore.training.report import ResumeReport
from ckptstore.training.sampler import ElasticSampler
from ckptstore.training.short_run import Program, prove_resume
from ckptstore.training.state import TrainingState
from ckptstore.training.stopping import StoppedBySignal
from ckptstore.training.tolerances import Tolerances
from ckptstore.training.trace import Conditions, Observation
from ckptstore.training.values import value_types

__all__ = [
    "ABSENT",
    "AddedParameters",
    "Checkpointer",
    "Collate",
    "Conditions",
    "Difference",
    "ElasticSampler",
    "Fingerprint",
    "GrownVocabulary",
    "Keep",
    "KeepFailed",
    "Matrix",
    "Migrator",
    "Observation",
    "PerRank",
    "Program",
    "Progress",
    "Proof",
    "ProofEnded",
    "ResumeReport",
    "Resumed",
    "StoppedBySignal",
    "Stopping",
    "Tolerances",
    "TraceFailed",
    "TrainingState",
    "fingerprint",
    "prove_resume",
    "resume",
    "save",
    "value_types",
]
