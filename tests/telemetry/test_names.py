"""The README's table and the code name the same metrics, and so do those who asked for them."""

import re
from pathlib import Path

from ckptstore.telemetry import METRICS

README = Path(__file__).parents[2] / "ckptstore" / "telemetry" / "README.md"
ASKED_FOR = (
    *("checkpoint_save_duration_seconds", "checkpoint_async_staging_seconds", "checkpoint_bytes_total"),
    *("checkpoint_commit_lag_seconds", "checkpoint_inprogress_count", "checkpoint_last_committed_step"),
    *("checkpoint_restore_duration_seconds", "checkpoint_restore_failures_total", "checkpoint_checksum_failures_total"),
    *("checkpoint_reprocessed_samples_total", "resume_loss_delta", "resume_world_size_change_total"),
    *("checkpoint_recovery_point_seconds", "checkpoint_recovery_point_steps"),
)


def test_the_table_says_what_the_code_says():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", README.read_text(), re.MULTILINE)
    assert rows == [
        (name, each.kind, ", ".join(f"`{label}`" for label in each.labels), each.unit, each.who)
        for name, each in METRICS.items()
    ]


def test_the_metrics_that_dashboards_elsewhere_ask_for_are_called_so():
    assert [name for name in ASKED_FOR if name not in METRICS] == []
    assert METRICS["checkpoint_restore_failures_total"].labels == ("reason",)


def test_names_end_as_prometheus_wants_it():
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.kind == "counter"), name
        if metric.unit in ("seconds", "bytes", "steps") and metric.kind != "counter":
            assert name.endswith((f"_{metric.unit}", "_step")), name
