"""Every metric, once: its name, what it is, and who exposes it. The README's table says the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Who = Literal["every rank", "rank 0", "rank 0, bucket", "bucket"]

AGAINST = ("committed", "verified", "proved")
"""What a recovery point is measured against: the newest checkpoint, and the newest that is known to be good."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: As it is exposed.
        kind: What it is.
        unit: Of its value; empty: none.
        who: Exposes it. `bucket` is `ckptstore metrics URL`.
        help: What it says.
        labels: Beside `run`.
    """

    name: str
    kind: Kind
    unit: str
    who: Who
    help: str
    labels: tuple[str, ...] = ()


_ALL = (
    Metric(
        "checkpoint_save_duration_seconds",
        "histogram",
        "seconds",
        "every rank",
        "Of a save that ended well: from the call, once the save before has ended, to the end on this rank.",
    ),
    Metric(
        "checkpoint_async_staging_seconds",
        "histogram",
        "seconds",
        "every rank",
        "How long the training waited until the state of a background save might be changed again.",
    ),
    Metric(
        "checkpoint_phase_seconds",
        "histogram",
        "seconds",
        "every rank",
        "Of a phase of a save; gather, verify and commit are of rank 0.",
        ("phase",),
    ),
    Metric("checkpoint_bytes_total", "counter", "bytes", "every rank", "Shards that this rank has stored."),
    Metric(
        "checkpoint_commit_lag_seconds",
        "gauge",
        "seconds",
        "every rank",
        "The greater of: from the call of the last commit to its record (rank 0); the age of the oldest save that has "
        "not ended.",
    ),
    Metric("checkpoint_inprogress_count", "gauge", "saves", "every rank", "Saves that were begun and have not ended."),
    Metric(
        "checkpoint_save_failures_total", "counter", "saves", "every rank", "Saves that failed, by code.", ("reason",)
    ),
    Metric(
        "checkpoint_saves_skipped_total",
        "counter",
        "saves",
        "every rank",
        "Background saves that were not begun, because the one before had not ended.",
    ),
    Metric(
        "checkpoint_saves_abandoned_total",
        "counter",
        "saves",
        "every rank",
        "Background saves that were given up after their time and may still hold a thread and memory.",
    ),
    Metric(
        "checkpoint_commits_total",
        "counter",
        "checkpoints",
        "rank 0, bucket",
        "Commits: of this process; from the bucket, of the run, ever.",
    ),
    Metric(
        "checkpoint_keep_failures_total",
        "counter",
        "failures",
        "rank 0",
        "What the job's policy would have retired, deleted, pinned or let go of, and could not.",
    ),
    Metric(
        "checkpoint_last_committed_step",
        "gauge",
        "steps",
        "rank 0, bucket",
        "The global step of the newest checkpoint that may be loaded.",
    ),
    Metric(
        "checkpoint_recovery_point_seconds",
        "gauge",
        "seconds",
        "rank 0, bucket",
        "How long ago the newest checkpoint was committed: of all, of those verified byte by byte, of those from which "
        "a resume was proved.",
        ("against",),
    ),
    Metric(
        "checkpoint_recovery_point_steps",
        "gauge",
        "steps",
        "rank 0, bucket",
        "How many steps that checkpoint is behind: behind the training; from the bucket, behind the newest commit.",
        ("against",),
    ),
    Metric(
        "checkpoint_restore_duration_seconds",
        "histogram",
        "seconds",
        "every rank",
        "Of a resume, from the call on, or of a load by itself.",
    ),
    Metric(
        "checkpoint_restore_failures_total",
        "counter",
        "restores",
        "every rank",
        "Loads and resumes that failed, and damaged checkpoints that a resume passed over, by code. The same on all "
        "ranks.",
        ("reason",),
    ),
    Metric(
        "checkpoint_checksum_failures_total",
        "counter",
        "failures",
        "every rank",
        "Saves, loads and resumes that met something that is not what was written. The same on all ranks.",
    ),
    Metric(
        "checkpoint_reprocessed_samples_total",
        "counter",
        "samples",
        "every rank",
        "At each resume: by how many samples the run is known to have been ahead of the checkpoint, by "
        "consumed_samples of newer checkpoints or by what was recorded right after it. At least so many are trained "
        "again. The same on all ranks.",
    ),
    Metric(
        "resume_loss_delta",
        "gauge",
        "",
        "every rank",
        "The loss of the first step after the last resume, minus that of the run that went on. The same on all ranks.",
    ),
    Metric(
        "resume_world_size_change_total",
        "counter",
        "resumes",
        "every rank",
        "Resumes on another number of ranks than saved. The same on all ranks.",
    ),
    Metric(
        "resume_proofs_total",
        "counter",
        "resumes",
        "every rank",
        "Comparisons with the run that went on, by verdict. The same on all ranks.",
        ("verdict",),
    ),
    Metric("checkpoint_kept_count", "gauge", "checkpoints", "bucket", "Committed, and not retired."),
    Metric("checkpoint_kept_bytes", "gauge", "bytes", "bucket", "Their shards."),
    Metric(
        "checkpoint_set_aside_count",
        "gauge",
        "checkpoints",
        "bucket",
        "Those of them that may not be loaded by default, by reason.",
        ("reason",),
    ),
    Metric(
        "checkpoint_retired_count",
        "gauge",
        "checkpoints",
        "bucket",
        "Retired, and their bytes may not be gone yet.",
    ),
    Metric("checkpoint_orphan_count", "gauge", "attempts", "bucket", "Attempts that have data and can never commit."),
    Metric("checkpoint_orphan_bytes", "gauge", "bytes", "bucket", "Their data."),
    Metric(
        "checkpoint_uncommitted_count", "gauge", "attempts", "bucket", "Attempts that have data and may still commit."
    ),
    Metric(
        "checkpoint_claimed_without_commit",
        "gauge",
        "",
        "bucket",
        "1: the newest claim of the run has not committed anything since.",
    ),
    Metric("checkpoint_claim_age_seconds", "gauge", "seconds", "bucket", "How long ago the run was claimed last."),
    Metric(
        "checkpoint_run_exists",
        "gauge",
        "",
        "bucket",
        "0: no run was ever begun at this root, so nothing else is known of it.",
    ),
    Metric(
        "checkpoint_log_tail_lost",
        "gauge",
        "",
        "bucket",
        "1: latest.json names a slot beyond the end of the log, or it or data tell of a commit and the log of none.",
    ),
)

METRICS = {metric.name: metric for metric in _ALL}
"""By name, in the order of the README."""
