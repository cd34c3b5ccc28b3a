"""DCP's storage writer and reader for checkpoints that are whole or absent, and DCP's own calls with our errors.

```python
import storage_writers as sw

writer = sw.CkptStoreWriter("s3://bucket/runs/llama-7b")
sw.save(state, checkpoint_id="step-12000", storage_writer=writer)
sw.load(state, storage_reader=sw.CkptStoreReader("s3://bucket/runs/llama-7b"))
```
"""

from storage_writers.calls import async_save, load, save, wait
from storage_writers.exits import EXIT_CODE
from storage_writers.incarnations import begin_incarnation
from storage_writers.outstanding import SaveFuture
from storage_writers.reader import CkptStoreReader, LoadReport
from storage_writers.save_planner import SavePlanner
from storage_writers.survivors import cause
from storage_writers.typed import TypedValue
from storage_writers.writer import CkptStoreWriter

__all__ = [
    "EXIT_CODE",
    "CkptStoreReader",
    "CkptStoreWriter",
    "LoadReport",
    "SaveFuture",
    "SavePlanner",
    "TypedValue",
    "async_save",
    "begin_incarnation",
    "cause",
    "load",
    "save",
    "wait",
]
