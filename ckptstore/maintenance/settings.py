"""Whether a bucket's own settings would break a run that lives in it, or cost more than they need."""

from __future__ import annotations

from ckptstore.errors import UnsupportedError
from ckptstore.format.layout import DATA_PREFIX, LOG_PREFIX, RUN_KEY
from ckptstore.format.records import MAX_RECORD_BYTES
from ckptstore.maintenance.report import Check, fine
from ckptstore.objectstore.bucket import BucketSettings, Lock, Rule, Unknown

UNREADABLE = ("GLACIER", "DEEP_ARCHIVE")
"""Storage classes whose objects must be restored, for hours, before they can be read."""
ABORT_DAYS = 7


def judge_settings(settings: BucketSettings) -> list[Check]:
    """Return a check for each setting; one alone if for one reason none was looked at."""
    if isinstance(settings.rules, Unknown) and settings.rules is settings.keeps_versions is settings.lock:
        return [_unknown("lifecycle rules", settings.rules)]
    return [
        _of_rules(settings),
        _of_incomplete_uploads(settings),
        _of_versions(settings),
        _of_lock(settings.lock),
    ]


def _unknown(name: str, why: Unknown) -> Check:
    return Check("bucket", name, "unknown", why.reason, hint=why.hint)


def _of_rules(settings: BucketSettings) -> Check:
    name, rules = "lifecycle rules", settings.rules
    if isinstance(rules, Unknown):
        return _unknown(name, rules)
    harmful = [told for rule in rules if (told := _harm_of(rule, settings.root)) is not None]
    if harmful:
        error = UnsupportedError(
            " ".join(harmful),
            hint=f"Take {settings.root or 'this run'} out of these rules: give them a prefix of something else. "
            "What may go is for `ckptstore` to decide.",
        )
        return Check("bucket", name, "failed", error.message, hint=error.hint, error=error)
    return fine("bucket", name, f"{len(rules)} in force; none deletes or archives what this run needs.")


def _harm_of(rule: Rule, root: str) -> str | None:
    """Return what a rule would do to the run, or None."""
    gone = [each for each in rule.archives_to if each in UNREADABLE]
    if rule.tagged or not (rule.expires or gone):
        return None
    hit = [what for what, key in (("the log", LOG_PREFIX), ("run.json", RUN_KEY)) if _meets(rule, root + key)]
    if rule.larger_than is not None and rule.larger_than >= MAX_RECORD_BYTES:
        hit = []
    hit += ["the data of checkpoints"] if _meets(rule, root + DATA_PREFIX) else []
    if not hit:
        return None
    when = f" after {rule.expires_after_days} days" if rule.expires_after_days is not None else ""
    does = f"deletes{when}" if rule.expires else f"moves to {gone[0]}, where nothing can be read at once,"
    return f"The rule {rule.name or 'without a name'!r} (prefix {rule.prefix!r}) {does} {' and '.join(hit)}."


def _meets(rule: Rule, target: str) -> bool:
    """Say whether a rule is for something at `target`: a key, or all under a prefix with its slash."""
    return target.startswith(rule.prefix) or (target.endswith("/") and rule.prefix.startswith(target))


def _of_incomplete_uploads(settings: BucketSettings) -> Check:
    name, rules, data = "incomplete uploads", settings.rules, settings.root + DATA_PREFIX
    if isinstance(rules, Unknown):
        return _unknown(name, rules)
    days = [
        rule.aborts_uploads_after_days
        for rule in rules
        if rule.aborts_uploads_after_days is not None and data.startswith(rule.prefix)
    ]
    if days:
        return fine("bucket", name, f"A rule removes them after {min(days)} days.", value=min(days), unit="days")
    return Check(
        "bucket",
        name,
        "warning",
        "No rule removes uploads that killed jobs leave: they stay, and are paid for.",
        hint=f"Add a lifecycle rule with AbortIncompleteMultipartUpload, DaysAfterInitiation {ABORT_DAYS}, for the "
        f"prefix {data!r}; `ckptstore doctor URL --uploads` lists what is there.",
    )


def _of_versions(settings: BucketSettings) -> Check:
    name, keeps, rules = "versioning", settings.keeps_versions, settings.rules
    if isinstance(keeps, Unknown):
        return _unknown(name, keeps)
    if not keeps:
        return fine("bucket", name, "Off: what is deleted or overwritten is gone.", value="off")
    data = settings.root + DATA_PREFIX
    if isinstance(rules, Unknown) or any(rule.expires_old_versions and data.startswith(rule.prefix) for rule in rules):
        return fine("bucket", name, "On: what is deleted or overwritten can be brought back.", value="on")
    return Check(
        "bucket",
        name,
        "warning",
        "On, and no rule removes old versions: what is deleted still takes its space.",
        hint=f"Add a lifecycle rule with NoncurrentVersionExpiration for the prefix {settings.root!r}.",
        value="on",
    )


def _of_lock(lock: Lock | Unknown) -> Check:
    name = "object lock"
    if isinstance(lock, Unknown):
        return _unknown(name, lock)
    if lock.mode is None:
        return fine("bucket", name, "No object is locked by default.", value="on" if lock.enabled else "off")
    return Check(
        "bucket",
        name,
        "warning",
        f"Every object is locked for {lock.period} ({lock.mode}). That suits the log. But what is deleted or "
        "overwritten stays as a version until then, and where there are no versions deleting is refused.",
        hint="Let the lock end before checkpoints are retired, and leave checksums on: such a bucket demands them.",
        value=lock.mode.lower(),
    )
