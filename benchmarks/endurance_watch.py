"""Who looks at the run all the time, in a process of its own, and who judges it at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak import measured
from ckptstore import Checkpoint, CheckpointStore, CkptStoreError, NotFoundError, UnavailableError
from ckptstore.format.records import Commit

PAUSE_SECONDS = 1.0


def watch(url: str, options: Mapping[str, object], told: Path) -> None:
    """Look for the latest until killed, by a store kept open and by one opened each time; write down what is wrong.

    The latest never goes back (nobody rolls back here), and all its weights hold the number of its step.
    """
    kept, newest = None, -1
    with told.open("a", buffering=1) as file:
        while True:
            seen: dict[str, Any] = {"at": time.time(), "wrong": []}
            try:
                kept = kept or CheckpointStore.open(url, storage_options=options)
                for store in (kept, CheckpointStore.open(url, storage_options=options)):
                    latest = store.latest()
                    seq = -1 if latest is None else latest.seq
                    if seq < newest:
                        seen["wrong"].append(f"the latest went from {newest} back to {seq}")
                    newest = max(newest, seq)
                    if latest is not None:
                        seen["wrong"] += wrong_values(latest, store)
                seen["latest"] = newest
            except UnavailableError as error:  # it is being restarted
                seen["unavailable"] = error.code
            except CkptStoreError as error:
                seen["wrong"].append(f"{error!r}")
            file.write(json.dumps({**seen, "held": measured("self")}) + "\n")
            time.sleep(PAUSE_SECONDS)


def wrong_values(checkpoint: Checkpoint, store: CheckpointStore) -> list[str]:
    """Read all weights, and return which are not of the checkpoint's own step: none, if it was retired meanwhile."""
    name = f"{checkpoint.checkpoint_id}@{checkpoint.seq}"
    try:
        weights = [key for key in checkpoint.keys if key.startswith("model.")]
        return [
            f"{key} of {name} does not hold {checkpoint.global_step}"
            for key in weights
            if not (checkpoint.read(key) == checkpoint.global_step).all()
        ] or ([] if weights else [f"{name} holds no weights"])
    except UnavailableError:
        raise  # which says nothing of the checkpoint
    except CkptStoreError as error:
        return [f"{name}: {error!r}"] if is_kept(checkpoint, store) else []


def is_kept(checkpoint: Checkpoint, store: CheckpointStore) -> bool:
    """Say whether it has not been retired."""
    try:
        store.get(seq=checkpoint.seq)
    except NotFoundError:
        return False
    return True


def judged(store: CheckpointStore, committed: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return what the run holds at the end, and what is wrong with it.

    Args:
        store: The run; nobody writes to it any more.
        committed: What ranks were told of their commits.
    """
    wrong: list[str] = []
    log = {entry.seq: entry.record for entry in store.records()}
    wrong += [f"the log ignored {each}" for each in store.ignored]
    for each in committed:  # I5
        record = log.get(each["seq"])
        if not isinstance(record, Commit) or record.checkpoint_id != each["checkpoint_id"]:
            wrong.append(f"{each['checkpoint_id']}@{each['seq']} was reported committed; there is {record!r:.80}")
    kept = store.checkpoints(include_set_aside=True)
    for checkpoint in kept:  # I4
        wrong += wrong_values(checkpoint, store)
        verdict = store.verify(checkpoint, level="full")
        wrong += [f"{checkpoint.checkpoint_id}@{checkpoint.seq}: {finding}" for finding in verdict.findings]
    kinds = [record.KIND if hasattr(record, "KIND") else "?" for record in log.values()]
    facts = {
        "records": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "kept": [f"{each.checkpoint_id}@{each.seq}" for each in kept],
        "uncommitted": [str(each.stem) for each in store.uncommitted()],
    }
    return facts, wrong


def lines(path: Path) -> list[dict[str, Any]]:
    """Return what was written; a line that was cut by a kill is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
