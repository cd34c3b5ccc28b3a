"""What the credentials may do, one permission at a time, and what will not work without each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from ckptstore.errors import AccessDeniedError, Fact, UnsupportedError
from ckptstore.maintenance.noting import (
    ABORT,
    CREATE,
    DELETE,
    LIST,
    LIST_UPLOADS,
    MULTIPART,
    OVERWRITE,
    PERMISSIONS,
    READ,
    NotingStore,
)
from ckptstore.maintenance.report import Check, Role

NEEDED: dict[Role, tuple[str, ...]] = {
    "reader": (LIST, READ),
    "trainer": (LIST, READ, CREATE, MULTIPART),
    "collector": (LIST, READ, CREATE, DELETE, LIST_UPLOADS, ABORT),
}
"""What each role cannot do without. What it also uses, and works worse without, is a warning."""

_USED: dict[Role, tuple[str, ...]] = {
    "reader": (),
    "trainer": (OVERWRITE, DELETE, ABORT, LIST_UPLOADS),
    "collector": (OVERWRITE, MULTIPART),
}

_WITHOUT = {
    LIST: "absent and denied cannot be told apart, so that nothing can be read or committed safely",
    READ: "no checkpoint can be loaded",
    CREATE: "no job can claim the run, commit, pin or roll back",
    OVERWRITE: "hints (latest.json, state/) cannot be kept, so that opening a long log takes longer",
    DELETE: "what is retired, and what the probes wrote, stays and is paid for",
    MULTIPART: "no shard larger than one part can be saved",
    ABORT: "an upload that failed stays and is paid for until a rule of the bucket removes it",
    LIST_UPLOADS: "incomplete uploads cannot be found; a rule of the bucket must remove them",
}

_RIGHTS: dict[str, dict[str, str]] = {
    "s3": {
        LIST: "s3:ListBucket",
        READ: "s3:GetObject",
        CREATE: "s3:PutObject",
        OVERWRITE: "s3:PutObject",
        DELETE: "s3:DeleteObject",
        MULTIPART: "s3:PutObject",
        ABORT: "s3:AbortMultipartUpload",
        LIST_UPLOADS: "s3:ListBucketMultipartUploads",
    },
    "gs": {
        LIST: "storage.objects.list",
        READ: "storage.objects.get",
        CREATE: "storage.objects.create",
        OVERWRITE: "storage.objects.delete",
        DELETE: "storage.objects.delete",
        MULTIPART: "storage.objects.create",
        ABORT: "storage.multipartUploads.abort",
        LIST_UPLOADS: "storage.multipartUploads.list",
    },
}


def judge(store: NotingStore, role: Role) -> list[Check]:
    """Return a check for each permission that `role` has a use for, from what the store was seen to allow.

    What the store itself cannot do is no matter of permission: nobody can grant it, and its behaviour is judged apart.
    """
    names = [name for name in PERMISSIONS if name in NEEDED[role] + _USED[role]]
    return [_judged(store, name, role) for name in names if name not in _beyond(store)]


def roles_of(store: NotingStore) -> Mapping[Role, bool | None]:
    """Return for each role whether the credentials are enough; None: something it needs was not tried."""
    found: dict[Role, bool | None] = {}
    for role in get_args(Role):
        needed = [name for name in NEEDED[role] if name not in _beyond(store)]
        denied = [name for name in needed if isinstance(store.refused.get(name), AccessDeniedError)]
        untried = [name for name in needed if name not in store.allowed]
        found[role] = False if denied else None if untried else True
    return found


def _beyond(store: NotingStore) -> set[str]:
    """Return what the store cannot do, whoever asks."""
    beyond = {name for name, refusal in store.refused.items() if isinstance(refusal, UnsupportedError)} - store.allowed
    return beyond | {ABORT} if LIST_UPLOADS in beyond else beyond  # what is never named is never aborted


def _judged(store: NotingStore, name: str, role: Role) -> Check:
    refusal = store.refused.get(name)
    right = _RIGHTS.get(store.url.partition("://")[0], {}).get(name)
    facts: dict[str, Fact] = {"right": right, "needed_by": [who for who, names in NEEDED.items() if name in names]}
    if isinstance(refusal, AccessDeniedError):
        message, hint = f"Denied: without it {_WITHOUT[name]}.", f"Allow {right or name}."
        if name in (DELETE, OVERWRITE):
            hint += " If it is allowed, the bucket is locked or has a retention."
        if name not in NEEDED[role]:
            return Check("permission", name, "warning", message, hint=hint, facts=facts)
        error = AccessDeniedError(message, hint=hint, **refusal.facts)
        return Check("permission", name, "failed", message, hint=hint, facts=facts, error=error)
    if name in store.allowed:
        return Check("permission", name, "ok", "Allowed.", facts=facts)
    return Check("permission", name, "unknown", "Not tried.", facts=facts)
