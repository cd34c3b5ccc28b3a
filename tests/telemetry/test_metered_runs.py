"""Real trainings with real faults, scraped over HTTP and read by Prometheus' own parser: each value is right."""

import time
from datetime import UTC, datetime

import pytest
import torch.distributed as dist
from metered import BATCH, Store, Story

from ckptstore import AccessDeniedError, CheckpointStore
from ckptstore.format.records import Verified
from ckptstore.objectstore.urls import open_store
from ckptstore.protocol.log import RunLog

COMMITTED, VERIFIED, PROVED = (("against", name) for name in ("committed", "verified", "proved"))


def first_life(url):
    """Save at step 2, fail at 4, save at 6 in the background while it is watched; go on to step 7."""
    story = Story(url)
    began = time.monotonic()
    story.steps(2)
    story.checkpointer.save()
    story.steps(2)
    with Store.refusing("rank-00001"), pytest.raises(AccessDeniedError):
        story.checkpointer.save()
    story.steps(2)
    before = story.scrape()
    story.checkpointer._background = True
    with Store.holding("rank-0000") as go:
        story.checkpointer.save()
        time.sleep(0.2)
        during = story.scrape()
        dist.barrier()
        go()
        story.checkpointer.wait()
    story.steps(1)
    after = story.scrape()
    elapsed = time.monotonic() - began
    dist.barrier()
    story.close()
    return before, during, after, elapsed


def second_life(url):
    """Pass over the damaged checkpoint of step 6, go on from step 2 on other ranks, and save at step 5."""
    story = Story(url, seed=2)
    report = story.checkpointer.resume()
    resumed = story.scrape()
    story.steps(3)
    story.checkpointer.wait()
    until_proved(url)
    story.checkpointer.save()
    story.steps(4)
    after = story.scrape()
    dist.barrier()
    story.close()
    return resumed, after, report.proof.resume_loss_delta, report.global_step


def until_proved(url):
    from metered import until  # noqa: PLC0415  (beside the ranks)

    until(lambda: CheckpointStore.open(url).get(step=2).committed.proved)


def shard_bytes(url, rank):
    """Return what the store holds of the shards of a rank."""
    return sum(info.size for info in open_store(url).list("data/") if f"rank-{rank:05d}" in info.key)


def damaged(store, name):
    """Flip a bit of the last byte of every shard of a checkpoint."""
    (prefix,) = {each.commit.prefix for each in store.checkpoints() if each.checkpoint_id == name}
    objects = open_store(store.url)
    for info in [info for info in objects.list("data/") if prefix in info.key and "rank-" in info.key]:
        body = bytearray(objects.get(info.key, max_bytes=1 << 20))
        body[-1] ^= 1
        objects.put(info.key, bytes(body))


def age(store, step):
    return (datetime.now(UTC) - datetime.fromisoformat(store.get(step=step).committed_at)).total_seconds()


@pytest.fixture(scope="module")
def lives(gang, tmp_path_factory):
    """Run both lives; return what each rank scraped, and the run between them and after them."""
    url = str(tmp_path_factory.mktemp("story") / "run")
    first = gang.values(2, first_life, url)
    stored = [shard_bytes(url, rank) for rank in range(2)]
    store = CheckpointStore.open(url)
    first_age = age(store, 6)
    log = RunLog.open(open_store(url))
    log.append(lambda _: Verified(store.get(step=2).seq, "full"))
    damaged(store, "step-6")
    second = gang.values(3, second_life, url)
    return url, first, stored, first_age, second


def test_a_run_with_a_failed_save_is_told_in_numbers(lives):
    _, ((before, during, after, elapsed), other), stored, first_age, _ = lives
    assert before[("checkpoint_save_duration_seconds_count",)] == 1
    assert before[("checkpoint_save_failures_total", ("reason", "access_denied"))] == 1
    assert before[("checkpoint_last_committed_step",)] == 2
    assert before[("checkpoint_recovery_point_steps", COMMITTED)] == 4
    assert before[("checkpoint_inprogress_count",)] == 0
    assert before[("checkpoint_async_staging_seconds_count",)] == 0

    assert during[("checkpoint_inprogress_count",)] == 1
    assert 0.2 <= during[("checkpoint_commit_lag_seconds",)] < elapsed
    assert during[("checkpoint_async_staging_seconds_count",)] == 1

    assert after[("checkpoint_inprogress_count",)] == 0
    assert after[("checkpoint_save_duration_seconds_count",)] == 2
    lag, staging = after[("checkpoint_commit_lag_seconds",)], after[("checkpoint_async_staging_seconds_sum",)]
    assert 0.2 <= lag <= after[("checkpoint_save_duration_seconds_sum",)] < elapsed
    assert 0 < staging < lag
    assert after[("checkpoint_commits_total",)] == 2
    assert after[("checkpoint_last_committed_step",)] == 6
    assert after[("checkpoint_recovery_point_steps", COMMITTED)] == 1
    assert 0 <= after[("checkpoint_recovery_point_seconds", COMMITTED)] <= first_age
    assert [each[("checkpoint_bytes_total",)] for each in (after, other[2])] == stored
    assert {value for (name, *_), value in after.items() if name == "checkpoint_save_failures_total"} == {0, 1}
    phases = ("stage", "plan", "upload", "gather", "verify", "commit")
    counted = {phase: after[("checkpoint_phase_seconds_count", ("phase", phase))] for phase in phases}
    assert counted == {"stage": 1, "plan": 3, "upload": 3, "gather": 2, "verify": 2, "commit": 2}
    total = sum(after[("checkpoint_phase_seconds_sum", ("phase", phase))] for phase in phases[1:])
    assert total < elapsed


def test_other_ranks_tell_their_own_part_and_not_how_the_run_stands(lives):
    _, (_, (before, during, after, _)), _, _, _ = lives
    assert before[("checkpoint_save_failures_total", ("reason", "access_denied"))] == 1
    assert during[("checkpoint_inprogress_count",)] == 1
    assert after[("checkpoint_save_duration_seconds_count",)] == 2
    assert after[("checkpoint_inprogress_count",)] == 0
    assert after[("checkpoint_commits_total",)] == 0
    assert not [key for key in after if "recovery_point" in key[0] or "last_committed" in key[0]]


def test_a_resume_past_a_damaged_checkpoint_on_other_ranks_is_told_in_numbers(lives):
    url, _, _, _, second = lives
    for resumed, _, _, step in second:
        assert step == 2
        assert resumed[("checkpoint_restore_failures_total", ("reason", "integrity"))] == 1
        assert resumed[("checkpoint_checksum_failures_total",)] == 1
        assert resumed[("checkpoint_reprocessed_samples_total",)] == 4 * BATCH
        assert resumed[("resume_world_size_change_total",)] == 1
        assert resumed[("checkpoint_restore_duration_seconds_count",)] == 1
        assert 0 < resumed[("checkpoint_restore_duration_seconds_sum",)] < 60
        assert ("resume_loss_delta",) not in resumed
    assert second[0][0][("checkpoint_last_committed_step",)] == 2
    store = CheckpointStore.open(url)
    for _, after, delta, _ in second:
        assert after[("resume_loss_delta",)] == delta
        assert after[("resume_proofs_total", ("verdict", "proved"))] == 1
    after = second[0][1]
    assert after[("checkpoint_last_committed_step",)] == 5
    steps = [after[("checkpoint_recovery_point_steps", against)] for against in (COMMITTED, VERIFIED, PROVED)]
    assert steps == [9 - 5, 9 - 2, 9 - 2]
    ages = [after[("checkpoint_recovery_point_seconds", against)] for against in (COMMITTED, VERIFIED, PROVED)]
    assert ages == pytest.approx([age(store, 5), age(store, 2), age(store, 2)], abs=30)
    assert ages[0] < ages[1] == pytest.approx(ages[2], abs=1)


def test_no_metric_holds_a_checkpoints_name_or_a_url(lives):
    url, first, _, _, second = lives
    for key in (*first[0][2], *second[0][1]):
        assert "step-" not in str(key)
        assert url not in str(key)
