"""Drill 2: an object of the newest checkpoint is gone."""

from __future__ import annotations

from ckptstore.drills.place import Place, expect
from ckptstore.drills.scenarios.runs import resumed_from, saved_twice, shard_of


def deleted_shard(place: Place) -> str:
    """Delete a shard of the newest checkpoint: it is found out, and the one before is resumed."""
    newest, before, digest = saved_twice(place)
    lost = shard_of(newest, place, 1)
    place.store().delete(lost)
    verdict = place.opened().verify(newest.checkpoint_id, level="exists")
    expect(not verdict.ok, f"A verification of {newest.checkpoint_id} missed that {lost} is gone.")
    told = resumed_from(place, before, digest)
    passed = [name for name, _ in told["passed_over"]]
    expect(passed == [newest.checkpoint_id], f"The resume says that it passed over {passed}.")
    return f"{newest.checkpoint_id} was refused ({told['passed_over'][0][1]}); {before.checkpoint_id} was resumed."
