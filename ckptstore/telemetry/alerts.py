"""Prometheus rules over these metrics: what somebody must look at, and the command to begin with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ckptstore.errors import InvalidInputError
from ckptstore.units import GIB

GROUP = "ckptstore"
MIN_SECONDS, MAX_SECONDS = 0.001, 10 * 366 * 86400
"""Prometheus counts in milliseconds; what is older than ten years nobody waits for."""
MAX_BYTES = 1 << 60
EVENT_SECONDS = 3600
"""For how long somebody is called for what has happened: it is an event, which no repair takes back."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From where on somebody is called.

    Args:
        recovery_point_seconds: Age of the newest checkpoint.
        verified_point_seconds: Age of the newest one that is verified byte by byte.
        proved_point_seconds: Age of the newest one from which a resume was proved.
        commit_lag_seconds: From the call of a save to its record, or how long one has been on its way.
        busy_seconds: For how long saves follow each other without a pause.
        orphan_bytes: Data that can never become a checkpoint.
        for_seconds: How long a condition holds before somebody is called, where it may pass by itself.

    Raises:
        InvalidInputError: One is no number of milliseconds up to ten years, or of bytes from 1 to 1 EiB.
    """

    recovery_point_seconds: float = 3600.0
    verified_point_seconds: float = 2 * 86400.0
    proved_point_seconds: float = 7 * 86400.0
    commit_lag_seconds: float = 900.0
    busy_seconds: float = 1800.0
    orphan_bytes: int = 500 * GIB
    for_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least, most = (1, MAX_BYTES) if name == "orphan_bytes" else (MIN_SECONDS, MAX_SECONDS)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise InvalidInputError(
                    f"{name} must be a number from {least} to {most}, not {value!r:.80}.",
                    hint=f"Set {name} to such a number.",
                    option=name,
                )


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule.

    Args:
        name: `Ckptstore...`.
        expr: In PromQL.
        severity: `critical`: what was trained may be lost; `warning`: something is on its way there.
        summary: In one line.
        description: What it means.
        command: What to run next.
        for_seconds: How long it holds before somebody is called; 0: at once.
    """

    name: str
    expr: str
    severity: str
    summary: str
    description: str
    command: str
    for_seconds: float = 0.0


def alerts_at(at: Thresholds) -> list[Alert]:
    """Return all rules."""
    return [*_points(at), *_saves(at), *_damage(), *_bucket(at)]


def _points(at: Thresholds) -> list[Alert]:
    point = "checkpoint_recovery_point_seconds"

    def older(against: str, seconds: float) -> str:
        return f'{point}{{against="{against}"}} > {seconds:g}'

    def older_or_none(against: str, seconds: float) -> str:
        """Return what is so also where a run that was committed to so long ago, and is now, never had one since."""
        committed, such, within = (
            f'{point}{{against="committed"}}',
            f'{point}{{against="{against}"}}',
            _duration(seconds),
        )
        before = f"max by (run) (max_over_time({committed}[{within}] offset {within}))"
        ever = f"max by (run) (max_over_time({such}[{within}]))"
        none = f"max by (run) ({committed}) and on (run) {before} unless on (run) {ever}"
        return f"{older(against, seconds)} or ({none}) * 0 + {seconds:g}"

    return [
        Alert(
            "CkptstoreRecoveryPointTooOld",
            older("committed", at.recovery_point_seconds),
            "critical",
            "The newest checkpoint is {{ $value | humanizeDuration }} old.",
            "A failure now costs all that was trained since. Saves fail, hang, or are not asked for.",
            "ckptstore ls URL",
            at.for_seconds,
        ),
        Alert(
            "CkptstoreVerifiedPointTooOld",
            older_or_none("verified", at.verified_point_seconds),
            "warning",
            "The newest checkpoint that is known to be whole is {{ $value | humanizeDuration }} old, or there is none.",
            "Newer ones are committed, and nobody has read them byte by byte since.",
            "ckptstore verify URL --level full --record",
            at.for_seconds,
        ),
        Alert(
            "CkptstoreProvedPointTooOld",
            older_or_none("proved", at.proved_point_seconds),
            "warning",
            "The newest one from which a resume was proved is {{ $value | humanizeDuration }} old, or there is none.",
            "Whether the run would go on as it did from newer ones was never tried.",
            "ckptstore ls URL",
            at.for_seconds,
        ),
        Alert(
            "CkptstoreResumeDiffers",
            'resume_proofs_total{verdict="differs"} > 0',
            "critical",
            "A resumed run does not do what the run did that went on.",
            "The first steps after the resume differ from those that were recorded with the checkpoint: see the log of "
            "rank 0 for which numbers.",
            "ckptstore show URL NAME",
        ),
    ]


def _saves(at: Thresholds) -> list[Alert]:
    busy = f"min_over_time(checkpoint_inprogress_count[{_duration(at.busy_seconds)}]) >= 1"
    since = f"checkpoint_inprogress_count offset {_duration(at.busy_seconds)} >= 1"
    skipped = f"increase(checkpoint_saves_skipped_total[{_duration(at.busy_seconds)}]) > 0"
    return [
        Alert(
            "CkptstoreCommitLagHigh",
            f"checkpoint_commit_lag_seconds > {at.commit_lag_seconds:g}",
            "warning",
            "A save takes {{ $value | humanizeDuration }} until it is committed.",
            "Until then its steps are not safe. The store is slow, or a rank does not come.",
            "ckptstore doctor URL",
        ),
        Alert(
            "CkptstoreSavesPilingUp",
            f"({busy} and {since}) or {skipped} or checkpoint_inprogress_count > 1",
            "warning",
            "Saves are asked for faster than they end.",
            "One save is always on its way, is skipped, or hangs beside the next: save less often, or find out why the "
            "store is slow.",
            "ckptstore tune URL",
        ),
        Alert(
            "CkptstoreSavesFailing",
            'sum by (run, job, instance) (increase(checkpoint_save_failures_total{reason!="fenced"}[1h])) >= 2',
            "critical",
            "Saves fail again and again.",
            "At least two in the last hour. The label reason of checkpoint_save_failures_total says with which code.",
            "ckptstore doctor URL --for trainer",
        ),
        Alert(
            "CkptstoreWriterFenced",
            'checkpoint_save_failures_total{reason="fenced"} > 0',
            "critical",
            "This job can save no more: another one has claimed the run.",
            "Two jobs were started on one run. The older one must stop; what it trains from now on is lost.",
            "ckptstore log URL",
        ),
    ]


def _damage() -> list[Alert]:
    quarantined = f'delta(checkpoint_set_aside_count{{reason="quarantined"}}[{EVENT_SECONDS}s]) > 0'
    return [
        Alert(
            "CkptstoreChecksumFailure",
            f"{_lately('checkpoint_checksum_failures_total')} or {quarantined}",
            "critical",
            "In the last hour something of a checkpoint was not what was written, or one was quarantined.",
            "A resume takes an older one. Find out which objects are damaged, and whether the store loses data. What a "
            "replica has is mended by: ckptstore repair URL NAME --from URL2 --restore --yes. What nobody has is let "
            "go by: ckptstore retire URL NAME.",
            "ckptstore verify URL --all --level full",
        ),
        Alert(
            "CkptstoreRestoreFailed",
            f"sum by (run, job, instance) ({_lately('checkpoint_restore_failures_total')}) > 0",
            "warning",
            "In the last hour a load or a resume failed, or passed a checkpoint over.",
            "The label reason of checkpoint_restore_failures_total says with which code.",
            "ckptstore ls URL --all",
        ),
        Alert(
            "CkptstoreLogTailLost",
            "checkpoint_log_tail_lost == 1",
            "critical",
            "The log was lost, or its end.",
            "Checkpoints were committed that cannot be seen any more. Save nothing; restore the log's objects.",
            "ckptstore log URL",
        ),
    ]


def _lately(counter: str) -> str:
    """Return what is so where a counter has grown lately: seen to grow, or above 0 when it was seen first."""
    since = f"{EVENT_SECONDS}s"
    return f"(increase({counter}[{since}]) > 0 or ({counter} > 0 unless {counter} offset {since}))"


def _bucket(at: Thresholds) -> list[Alert]:
    return [
        Alert(
            "CkptstoreClaimedWithoutCommit",
            f"checkpoint_claim_age_seconds > {at.recovery_point_seconds:g} and checkpoint_claimed_without_commit == 1",
            "critical",
            "A job took the run over {{ $value | humanizeDuration }} ago and has committed nothing.",
            "Whoever saved before is fenced, so nobody saves now.",
            "ckptstore log URL",
            at.for_seconds,
        ),
        Alert(
            "CkptstoreNoRun",
            "checkpoint_run_exists == 0",
            "critical",
            "There is no run at this root.",
            "Nothing was ever saved there, or `ckptstore metrics URL` is given a wrong one: no other alert can fire.",
            "ckptstore ls URL --all",
            at.for_seconds,
        ),
        Alert(
            "CkptstoreOrphanBytes",
            f"checkpoint_orphan_bytes > {at.orphan_bytes}",
            "warning",
            "{{ $value | humanize1024 }}B can never become a checkpoint.",
            "They are left of saves that died. A collection deletes them.",
            "ckptstore gc URL",
            at.for_seconds,
        ),
    ]


def rules(thresholds: Thresholds | None = None) -> str:
    """Return a Prometheus rule file, in YAML.

    Args:
        thresholds: From where on somebody is called.
    """
    lines = ["groups:", f"  - name: {GROUP}", "    rules:"]
    for each in alerts_at(thresholds or Thresholds()):
        lines += [f"      - alert: {each.name}", f"        expr: {_quoted(each.expr)}"]
        lines += [f"        for: {_duration(each.for_seconds)}"] if each.for_seconds else []
        lines += [
            "        labels:",
            f"          severity: {each.severity}",
            "        annotations:",
            f"          summary: {_quoted(each.summary)}",
            f"          description: {_quoted(each.description)}",
            f"          command: {_quoted(each.command)}",
        ]
    return "\n".join(lines) + "\n"


def _duration(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    return f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # JSON's texts are YAML's
