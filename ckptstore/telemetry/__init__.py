"""What a run tells its operators: Prometheus metrics, OpenTelemetry spans, and the alerts that read them.

```python
from ckptstore.telemetry import Metrics

metrics = Metrics(run="llama-7b")
metrics.serve(port=9464)
with Checkpointer("s3://bucket/runs/llama-7b", state, observer=metrics) as ckpt:
    ...
```
"""

from ckptstore.telemetry.alerts import Thresholds, rules
from ckptstore.telemetry.from_bucket import bucket_families
from ckptstore.telemetry.grafana import dashboard
from ckptstore.telemetry.names import METRICS, Metric
from ckptstore.telemetry.prometheus import Metrics
from ckptstore.telemetry.spans import Spans

__all__ = ["METRICS", "Metric", "Metrics", "Spans", "Thresholds", "bucket_families", "dashboard", "rules"]
