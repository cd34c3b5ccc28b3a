"""Bounded staging: what a background save holds of memory, and when the caller may go on."""

import random
import threading

import pytest
import torch
from staged import Slow, bytes_of, contents_of, saved, upload

from ckptstore.errors import BusyError, InvalidInputError, StalledError
from ckptstore.units import KIB, MIB
from storage_writers import tensors
from storage_writers.staging import StagingPool

SOON = 20.0


def state_of(*, large=5 * MIB):
    """Return about 12 MiB of tensors of many kinds; the largest is longer than a piece."""
    torch.manual_seed(0)
    tied = torch.randn(1000)
    return {
        "large": torch.randn(large // 4),
        "rows": torch.randn(600, 500).T,
        "wide": torch.randn(1, 300).expand(1000, 300),
        "tied": tied,
        "nested": {"tied": tied, "list": [torch.ones(7, dtype=torch.bfloat16), torch.tensor(2.5)]},
        "lazy": torch.randn(100, 100, dtype=torch.complex64).conj(),
        "negated": torch.randn(50, dtype=torch.complex64).conj().imag,
        "small": [torch.full((100,), value, dtype=torch.int16) for value in range(300)],
        "half": torch.randn(3 * MIB // 2, dtype=torch.bfloat16),
        "flags": torch.rand(1000) > 0.5,
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(20)),
        "computed": torch.nn.Parameter(torch.randn(20)) * 2,
    }


def expected_of(state):
    """Return the bytes of each tensor by its flattened name."""
    flat = {}

    def put(name, value):
        if isinstance(value, torch.Tensor):
            flat[name] = bytes_of(value)
        else:
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                put(f"{name}.{key}" if name else str(key), inner)

    put("", state)
    return flat


POOLS = [None, 0, 64, 100 * KIB, 4 * MIB, 5 * MIB + 64, 9 * MIB]


@pytest.mark.parametrize("staging_bytes", POOLS)
def test_every_save_has_the_bytes_of_the_state_within_the_budget(staging_bytes):
    state = state_of()
    pool = StagingPool(staging_bytes=staging_bytes)
    for _ in range(3):
        staged = pool.stage(state)
        assert saved(staged) == expected_of(state)
        staged.fence(seconds=SOON)
        staged.end()
        assert pool.held_bytes <= (16 * MIB if staging_bytes is None else staging_bytes)
    pool.close()
    assert pool.held_bytes == 0


def overwrite(state):
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, dict | list):
            overwrite(value)
        elif not value.is_conj() and not value.is_neg() and 0 not in value.stride():
            value.detach().fill_(1)


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.6, 1])
def test_a_state_that_is_changed_right_after_the_fence_is_saved_as_it_was(share):
    state = state_of()
    expected = expected_of(state)
    pool = StagingPool(staging_bytes=int(share * 13 * MIB))
    staged = pool.stage(state)
    assert staged.is_whole == (share == 1)
    got = {}
    uploading = threading.Thread(target=lambda: got.update(saved(staged, Slow())))
    uploading.start()
    staged.fence(seconds=SOON)
    fenced_before_the_end = uploading.is_alive()
    while uploading.is_alive():
        overwrite(state)
    assert got == expected
    assert fenced_before_the_end or share == 0
    staged.end()


def test_a_tensor_ten_times_the_pool_is_streamed_through_it():
    state = {"w": torch.randn(80 * MIB // 4)}
    expected = expected_of(state)
    pool = StagingPool(staging_bytes=8 * MIB)
    staged = pool.stage(state)
    assert not staged.is_whole
    assert saved(staged) == expected
    staged.fence(seconds=SOON)
    staged.end()
    assert pool.held_bytes == 8 * MIB


def test_the_fence_waits_for_what_is_not_staged_and_says_so_when_it_takes_too_long():
    staged = StagingPool(staging_bytes=0).stage({"w": torch.ones(10)})
    with pytest.raises(StalledError):
        staged.fence(seconds=0.05)
    contents = contents_of(staged)
    with pytest.raises(StalledError):
        staged.fence(seconds=0.05)
    upload(contents)
    staged.fence(seconds=SOON)
    staged.end()


def test_the_end_of_a_save_lets_the_fence_return():
    staged = StagingPool(staging_bytes=0).stage({"w": torch.ones(10)})
    ending = threading.Timer(0.1, staged.end)
    ending.start()
    staged.fence(seconds=SOON)
    staged.end()
    assert staged.state == {}
    ending.join()


def test_one_state_is_staged_at_a_time():
    pool = StagingPool()
    staged = pool.stage({"w": torch.ones(10)})
    with pytest.raises(BusyError):
        pool.stage({"w": torch.ones(10)})
    with pytest.raises(BusyError):
        pool.close()
    staged.end()
    pool.stage({"w": torch.ones(10)}).end()
    pool.close()


@pytest.mark.parametrize("wrong", [{"staging_bytes": -1}, {"staging_bytes": 1.5}, {"local_ranks": 0}, {"shared": "no"}])
def test_arguments_that_mean_nothing_are_refused(wrong):
    with pytest.raises(InvalidInputError):
        StagingPool(**wrong)


def test_stage_returns_before_anything_is_copied_and_the_upload_waits_for_each_copy(monkeypatch):
    gate, copy = threading.Event(), torch._foreach_copy_

    def held(targets, sources, **how):
        assert gate.wait(SOON)
        copy(targets, sources, **how)

    monkeypatch.setattr(torch, "_foreach_copy_", held)
    state = state_of()
    staged = StagingPool().stage(state)
    with pytest.raises(StalledError):
        staged.wait_copied(seconds=0.05)
    contents, got = contents_of(staged), {}
    uploading = threading.Thread(target=lambda: got.update(upload(contents)))
    uploading.start()
    uploading.join(0.1)
    assert uploading.is_alive()
    gate.set()
    staged.fence(seconds=SOON)
    uploading.join(SOON)
    assert got == expected_of(state)
    staged.end()


@pytest.mark.parametrize("seed", range(40))
def test_in_whatever_order_and_pool_a_state_is_uploaded_its_bytes_are_those_before_the_fence(monkeypatch, seed):
    """Tiny pieces and pools, and an upload that asks in another order than was expected: it never waits for room."""
    monkeypatch.setattr(tensors, "PIECE_BYTES", 256)
    chance = random.Random(seed)  # noqa: S311  (a test that can be repeated)
    tied = torch.randn(chance.randrange(1, 500))
    state = {"a": tied, "b": tied}
    for index in range(chance.randrange(12)):
        shape = [chance.randrange(0, 40) for _ in range(chance.randrange(4))]
        dtype = chance.choice([torch.float64, torch.float32, torch.bfloat16, torch.uint8])
        tensor = (torch.rand(shape) * 100).to(dtype)
        state[f"w{index}"] = tensor.permute(tuple(reversed(range(tensor.dim())))) if chance.random() < 0.3 else tensor
    expected = expected_of(state)
    need = sum(-(-len(data) // 64) * 64 for data in expected.values())
    pool = StagingPool(staging_bytes=chance.randrange(0, need + 64))
    for left_out in ((), ("a",), ("w0", "w1")):
        staged = pool.stage(state)
        contents, got = contents_of(staged, leave_out=left_out), {}
        names = {
            at: item.chunk.tensor.name for at, item in zip(contents.layout.order, contents.layout.items, strict=True)
        }
        order = list(range(len(names)))
        if chance.random() < 0.7:
            chance.shuffle(order)

        def uploading(contents=contents, got=got, names=names, order=order):
            for index in order:
                got[names[index]] = b"".join(map(bytes, contents.pieces(index)))

        thread = threading.Thread(target=uploading)
        thread.start()
        staged.fence(seconds=SOON)
        while thread.is_alive():
            overwrite(state)
        overwrite(state)
        assert got == {name: data for name, data in expected.items() if name not in left_out}
        staged.end()
        for name, data in expected.items():  # as it was, for the next save
            flat = torch.frombuffer(bytearray(data), dtype=state[name].dtype) if data else torch.empty(0)
            state[name].copy_(flat.reshape(state[name].shape))
