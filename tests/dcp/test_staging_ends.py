"""How staging ends: failures, references, threads, other processes, and what a rank does not write."""

import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from staged import Slow, bytes_of, contents_of, saved, upload

import storage_writers.staged
from ckptstore.errors import BusyError, InvalidInputError, UnavailableError
from ckptstore.units import KIB, MIB
from storage_writers.staging import StagingPool

SOON = 20.0


def staging_threads():
    return [each for each in threading.enumerate() if each.name in {"ckptstore-staging", "ckptstore-read-ahead"}]


def test_the_threads_of_staging_are_known_by_name():
    staged = StagingPool(staging_bytes=5 * MIB).stage({f"w{index}": torch.ones(MIB) for index in range(3)})
    contents_of(staged)
    assert staging_threads()
    staged.end()


@pytest.fixture
def broken_device(monkeypatch):
    """Copies of tensors of 777 elements raise, as those from a device that has failed do."""
    copy = torch._foreach_copy_

    def failing(targets, sources, **how):
        if any(source.numel() == 777 for source in sources):
            raise RuntimeError("device-side assert")
        copy(targets, sources, **how)

    monkeypatch.setattr(torch, "_foreach_copy_", failing)


@pytest.mark.parametrize("staging_bytes", [None, 100 * KIB])
def test_a_copy_that_fails_is_raised_by_the_fence_and_by_the_upload_with_its_key(broken_device, staging_bytes):
    pool = StagingPool(staging_bytes=staging_bytes)
    staged = pool.stage({"fine": torch.ones(25_000), "broken": torch.ones(777)})
    contents = contents_of(staged, leave_out=("fine",))  # whose room lets `broken` be read ahead
    for attempt in (staged.fence, staged.wait_copied) if staging_bytes is None else (staged.fence,):
        with pytest.raises(UnavailableError, match="broken could not be copied") as caught:
            attempt(seconds=SOON)
        assert "broken" in caught.value.facts["key"]
        assert str(caught.value.__cause__) == "device-side assert"
    with pytest.raises(UnavailableError, match="broken could not be copied"):
        upload(contents)
    staged.end()
    assert saved(pool.stage({"w": torch.ones(3)})) == {"w": bytes_of(torch.ones(3))}


def test_a_tensor_whose_memory_was_freed_is_refused_with_its_key():
    freed = torch.ones(10)
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidInputError, match=r"model\.freed"):
        StagingPool().stage({"model": {"freed": freed}})


def test_memory_that_there_is_not_is_an_error_with_its_size_and_the_pool_goes_on():
    pool = StagingPool(staging_bytes=2**50)
    with pytest.raises(UnavailableError, match=str(2**45)) as caught:
        pool.stage({"w": torch.zeros(1).expand(2**43)})
    assert "staging_bytes" in caught.value.hint
    assert pool.held_bytes == 0
    staged = pool.stage({"w": torch.ones(3)})
    staged.fence(seconds=SOON)
    staged.end()


def test_after_the_end_nothing_of_the_caller_is_held_and_no_thread_runs():
    for staging_bytes in (0, 100 * KIB, None):
        pool = StagingPool(staging_bytes=staging_bytes)
        state = {"a": torch.ones(50_000), "b": torch.ones(50_000), "c": [torch.ones(50_000)]}
        alive = [weakref.ref(value.untyped_storage()) for value in (state["a"], state["b"], state["c"][0])]
        staged = pool.stage(state)
        saved(staged)
        staged.end()
        del state
        gc.collect()
        assert [each() for each in alive] == [None] * 3
        assert staging_threads() == []


def test_an_end_in_the_middle_of_an_upload_stops_every_thread_and_the_upload():
    pool = StagingPool(staging_bytes=9 * MIB)
    staged = pool.stage({f"w{index}": torch.ones(MIB) for index in range(10)})
    contents, failures = contents_of(staged), []

    def uploading():
        try:
            upload(contents, Slow(seconds=0.05))
        except UnavailableError as error:
            failures.append(error)

    thread = threading.Thread(target=uploading)
    thread.start()
    staged.wait_copied(seconds=SOON)
    staged.end()
    assert staging_threads() == []
    thread.join(SOON)
    assert len(failures) == 1
    staged.fence(seconds=SOON)
    pool.close()


@pytest.mark.parametrize("staging_bytes", [None, 100 * KIB], ids=["whole", "reading-ahead"])
def test_a_copy_that_comes_back_after_the_end_gives_the_pool_back(monkeypatch, staging_bytes):
    copy, begun, answers = torch._foreach_copy_, threading.Event(), threading.Event()

    def hanging(targets, sources, **how):
        if any(source.numel() == 777 for source in sources):
            begun.set()
            assert answers.wait(SOON)
        copy(targets, sources, **how)

    monkeypatch.setattr(torch, "_foreach_copy_", hanging)
    monkeypatch.setattr(storage_writers.staged, "JOIN_SECONDS", 0.05)
    pool = StagingPool(staging_bytes=staging_bytes)
    staged = pool.stage({"fine": torch.ones(25_000), "hangs": torch.ones(777)})
    contents_of(staged, leave_out=("fine",))
    assert begun.wait(SOON)
    staged.end()
    with pytest.raises(BusyError, match="not come back from its device"):
        pool.stage({"w": torch.ones(3)})
    (late,) = [thread for thread in staging_threads() if thread.is_alive()]
    answers.set()
    late.join(SOON)
    again = pool.stage({"w": torch.ones(3)})
    assert saved(again) == {"w": bytes_of(torch.ones(3))}
    again.end()
    pool.close()


@pytest.mark.parametrize("staging_bytes", [0, 100 * KIB])
def test_what_another_rank_writes_is_not_waited_for_and_gives_its_room_back(staging_bytes):
    state = {f"w{index}": torch.randn(20_000) for index in range(4)}
    staged = StagingPool(staging_bytes=staging_bytes).stage(state)
    others = ("w0", "w2", "w3")  # of which w0 has a place in the larger pool
    contents = contents_of(staged, leave_out=others)
    if staging_bytes:
        staged.fence(seconds=SOON)  # all that this rank writes has been read ahead into the room of w0
    assert upload(contents) == {"w1": bytes_of(state["w1"])}
    staged.fence(seconds=SOON)
    staged.end()


@pytest.mark.parametrize("staging_bytes", [0, 100 * KIB, None])
def test_a_rank_that_writes_nothing_is_not_waited_for(staging_bytes):
    state = {f"w{index}": torch.randn(20_000) for index in range(4)}
    staged = StagingPool(staging_bytes=staging_bytes).stage(state)
    contents_of(staged, leave_out=tuple(state))
    staged.fence(seconds=SOON)
    staged.end()


def test_a_thousand_saves_hold_what_the_first_one_held():
    pool = StagingPool(staging_bytes=300 * KIB)
    state = {f"w{index}": torch.full((10_000,), float(index)) for index in range(10)}
    held = set()
    for step in range(1000):
        state["w3"].fill_(step)
        staged = pool.stage(state)
        contents = contents_of(staged)
        if step % 100 == 0:
            got = b"".join(map(bytes, contents.pieces(3)))
            assert got == bytes_of(torch.full((10_000,), float(step)))
        for index in range(10):
            if index != 3 or step % 100:
                assert sum(piece.nbytes for piece in contents.pieces(index)) == 40_000
        staged.fence(seconds=SOON)
        staged.end()
        held.add(pool.held_bytes)
    assert held == {300 * KIB}
    assert staging_threads() == []


def test_a_pool_grows_with_the_state_within_its_budget_and_does_not_shrink():
    pool = StagingPool(staging_bytes=MIB)
    held = []
    for count in (1000, 100, 200_000, 500_000, 10):
        staged = pool.stage({"w": torch.ones(count)})
        staged.fence(seconds=SOON) if staged.is_whole else saved(staged)
        staged.end()
        held.append(pool.held_bytes)
    assert held == [4032, 4032, 800_000, MIB, MIB]


def test_without_a_budget_the_free_memory_is_shared_among_the_ranks_of_a_host():
    state = {"w": torch.ones(10_000)}
    for local_ranks, whole in ((1, True), (10**9, False)):
        staged = StagingPool(local_ranks=local_ranks).stage(state)
        assert staged.is_whole == whole
        staged.end()


def test_a_pool_that_is_sent_to_another_process_leaves_its_memory_behind():
    pool = StagingPool(staging_bytes=MIB, local_ranks=2, shared=True)
    pool.stage({"w": torch.ones(1000)}).end()
    copied = pickle.loads(pickle.dumps(pool))  # noqa: S301
    assert copied.held_bytes == 0
    assert copied.stage({"w": torch.ones(1000)}).is_whole


SENDING = """
import resource, sys
import torch, torch.multiprocessing as mp
from storage_writers.staging import StagingPool

def summed(inbox, outbox):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    for _ in range(2):
        state = inbox.get(timeout=60)
        outbox.put((sum(int(value.sum()) for value in state.values()), len({v.data_ptr() for v in state.values()})))
        del state

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=summed, args=(inbox, outbox))
    child.start()
    pool = StagingPool(shared=sys.argv[1] == "shared")
    for save in (1, 2):
        staged = pool.stage({f"w{i}": torch.full((100,), save * i) for i in range(5000)})
        staged.fence(seconds=20)
        assert staged.is_whole
        inbox.put(staged.state)
        assert outbox.get(timeout=60) == (save * 100 * sum(range(5000)), 5000)
        staged.end()
    child.join(20)
    print("sent", child.exitcode)
"""


@pytest.mark.parametrize("kind", ["shared", "private"])
def test_a_staged_state_of_5000_tensors_is_sent_to_another_process_by_one_descriptor(tmp_path, kind):
    script = tmp_path / "sending.py"
    script.write_text(SENDING)
    done = subprocess.run([sys.executable, script, kind], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "sent 0\n", done.stderr


ENDING = """
import os, sys, threading
import torch
from staged import contents_of
from storage_writers.staging import StagingPool

pool = StagingPool(staging_bytes=5 * 2**20)
staged = pool.stage({f"w{i}": torch.ones(2**20) for i in range(10)})
contents = contents_of(staged)
assert any(thread.name == "ckptstore-read-ahead" for thread in threading.enumerate())
if sys.argv[1] == "fork":
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        print("child", os.waitstatus_to_exitcode(status), flush=True)
        staged.end()
    else:
        print("in the child", flush=True)
"""


@pytest.mark.parametrize(("how", "said"), [("exit", ""), ("fork", "in the child\nchild 0\n")])
def test_a_process_that_exits_or_forks_in_the_middle_of_a_save_does_not_hang(how, said):
    paths = os.pathsep.join([os.getcwd(), os.path.dirname(os.path.dirname(__file__))])  # noqa: PTH109, PTH120
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDING, how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_shared_memory_that_there_is_not_is_refused_before_it_is_touched():
    pool = StagingPool(staging_bytes=2**50, shared=True)
    with pytest.raises(UnavailableError, match="bytes left"):
        pool.stage({"w": torch.zeros(1).expand(2**43)})


def test_a_staged_state_that_has_ended_is_not_read():
    staged = StagingPool().stage({"w": torch.ones(10)})
    contents = contents_of(staged)
    staged.end()
    with pytest.raises(UnavailableError):
        upload(contents)


def test_a_tensor_that_is_not_what_was_planned_is_named():
    staged = StagingPool(staging_bytes=0).stage({"w": torch.ones(10)})

    class Odd(torch.distributed.checkpoint.DefaultSavePlanner):
        def resolve_data(self, write_item):
            return super().resolve_data(write_item)[:5]

    with pytest.raises(InvalidInputError, match="w was planned"):
        saved(staged, planner=Odd())
    staged.end()
