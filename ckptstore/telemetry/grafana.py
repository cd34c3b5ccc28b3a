"""A Grafana dashboard over these metrics."""

from __future__ import annotations

from typing import Any

WIDTH, HEIGHT = 12, 8
"""Of a panel; a row of the dashboard is 24 wide."""

_RUN = '{run=~"$run"}'


def _by(name: str, *labels: str) -> tuple[str, str]:
    shown = " ".join(f"{{{{{label}}}}}" for label in (*labels, "instance"))
    return f"{name}{_RUN}", f"{name.removeprefix('checkpoint_')} {shown}"


def _mean(name: str, label: str) -> tuple[str, str]:
    by = f"sum by ({label})"
    return f"{by} (rate({name}_sum{_RUN}[1h])) / {by} (rate({name}_count{_RUN}[1h]))", f"{{{{{label}}}}}"


def _quantiles(name: str) -> list[tuple[str, str]]:
    return [
        (f"histogram_quantile({of}, sum by (le) (rate({name}_bucket{_RUN}[1h])))", f"p{round(100 * of)}")
        for of in (0.5, 0.95)
    ]


_PANELS = [
    (
        "Recovery point: age of the newest checkpoint",
        "s",
        [_by("checkpoint_recovery_point_seconds", "against")],
    ),
    ("Recovery point: steps behind", "none", [_by("checkpoint_recovery_point_steps", "against")]),
    ("Last committed step", "none", [_by("checkpoint_last_committed_step")]),
    ("Commit lag", "s", [_by("checkpoint_commit_lag_seconds")]),
    ("Duration of saves", "s", _quantiles("checkpoint_save_duration_seconds")),
    ("Training held by staging", "s", _quantiles("checkpoint_async_staging_seconds")),
    ("Phases of saves, mean", "s", [_mean("checkpoint_phase_seconds", "phase")]),
    ("Stored by all ranks", "Bps", [(f"sum by (run) (rate(checkpoint_bytes_total{_RUN}[5m]))", "{{run}}")]),
    (
        "Saves in progress, skipped, given up",
        "none",
        [
            _by("checkpoint_inprogress_count"),
            (f"increase(checkpoint_saves_skipped_total{_RUN}[1h])", "skipped"),
            (f"increase(checkpoint_saves_abandoned_total{_RUN}[1h])", "given up"),
        ],
    ),
    (
        "Failures",
        "none",
        [
            (f"increase(checkpoint_save_failures_total{_RUN}[1h]) > 0", "save: {{reason}}"),
            (f"increase(checkpoint_restore_failures_total{_RUN}[1h]) > 0", "restore: {{reason}}"),
            (f"checkpoint_checksum_failures_total{_RUN}", "checksum {{instance}}"),
            (f"increase(checkpoint_keep_failures_total{_RUN}[1h]) > 0", "policy"),
        ],
    ),
    ("Duration of restores", "s", _quantiles("checkpoint_restore_duration_seconds")),
    (
        "Resumes",
        "none",
        [
            _by("resume_world_size_change_total"),
            _by("resume_proofs_total", "verdict"),
            _by("checkpoint_reprocessed_samples_total"),
        ],
    ),
    ("Loss after a resume, minus that of the run that went on", "none", [_by("resume_loss_delta")]),
    (
        "Checkpoints",
        "none",
        [
            _by("checkpoint_commits_total"),
            _by("checkpoint_kept_count"),
            _by("checkpoint_set_aside_count", "reason"),
            _by("checkpoint_retired_count"),
        ],
    ),
    ("Bytes in the bucket", "bytes", [_by("checkpoint_kept_bytes"), _by("checkpoint_orphan_bytes")]),
    (
        "Attempts without a commit, and the claim",
        "none",
        [
            _by("checkpoint_orphan_count"),
            _by("checkpoint_uncommitted_count"),
            _by("checkpoint_claimed_without_commit"),
            _by("checkpoint_claim_age_seconds"),
            _by("checkpoint_run_exists"),
            _by("checkpoint_log_tail_lost"),
        ],
    ),
]
"""Title, unit, and what is shown: an expression and how its series are called."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard as JSON, to be imported into Grafana."""
    return {
        "title": "ckptstore",
        "uid": "ckptstore",
        "tags": ["ckptstore"],
        "schemaVersion": 39,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "templating": {"list": [_source(), _runs()]},
        "panels": [_panel(at, *each) for at, each in enumerate(_PANELS)],
    }


def _panel(at: int, title: str, unit: str, targets: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": at + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": WIDTH * (at % 2), "y": HEIGHT * (at // 2), "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + nth), "expr": expr, "legendFormat": legend}
            for nth, (expr, legend) in enumerate(targets)
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _runs() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": "label_values(checkpoint_recovery_point_seconds, run)",
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "refresh": 2,
    }
