"""Which samples a batch is made of, whatever their order and whoever holds them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ckptstore.errors import InvalidInputError
from ckptstore.training.batches import DIGEST_MASK, batch_digest, combined


def test_shares_of_any_size_add_up_to_the_batch_in_any_order():
    ids = random.Random(0).sample(range(10**9), 60)  # noqa: S311  (any will do)
    whole = batch_digest(ids)
    for ranks in (1, 2, 3, 4, 7, 60, 64):
        shares = [ids[60 * rank // ranks : 60 * (rank + 1) // ranks] for rank in range(ranks)]
        assert combined(batch_digest(share[::-1]) for share in shares) == whole


def test_the_sum_may_run_over_as_it_does_where_ranks_add_integers_of_64_bits():
    digests = [batch_digest([at]) for at in range(1000)]
    with np.errstate(over="ignore"):
        wrapped = int(np.array(digests, np.int64).sum())
    assert combined([wrapped]) == combined(digests) == batch_digest(range(1000))


def test_the_digest_of_known_ids_stays_what_it_is():
    """Traces of an earlier release are compared with digests of this one."""
    assert f"{batch_digest([0]):x}" == f"{0xE220A8397B1DCDAF & DIGEST_MASK:x}"  # SplitMix64's first, of seed 0
    assert batch_digest([]) == 0


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 2**40],
        (np.int64(3), np.int32(1), 2**40),
        iter([3, 1, 2**40]),
        np.array([3, 1, 2**40]),
        np.array([3, 1, 2**40], np.uint64),
        torch.tensor([3, 1, 2**40]),
        [torch.tensor(3), torch.tensor(1), torch.tensor(2**40)],
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_an_index_is_the_same_however_it_is_handed_in(ids):
    assert batch_digest(ids) == batch_digest([2**40, 3, 1])


def test_other_samples_are_another_batch():
    batches = [
        *([at, at + 1] for at in range(500)),
        *([at] for at in range(500)),
        *([at, at] for at in range(500)),
        *([f"doc-{at}"] for at in range(500)),
        *([f"doc-{at}".encode()] for at in range(500)),
        [-1],
        [2**63],
    ]
    assert len({batch_digest(batch) for batch in batches}) == len(batches)


def test_samples_themselves_may_stand_for_their_ids():
    tokens = torch.arange(12).reshape(4, 3)
    whole = batch_digest(tokens)
    assert whole == combined([batch_digest(tokens[:1]), batch_digest(tokens[1:].flip(0))])
    assert whole == batch_digest(tokens.numpy()) == batch_digest(np.asfortranarray(tokens.numpy()))
    others = [tokens + 1, tokens.int(), tokens.reshape(3, 4), tokens.float(), tokens.bfloat16(), tokens[:3]]
    assert len({whole, *map(batch_digest, others)}) == 7
    assert batch_digest(torch.tensor([0.5, 1.5])) == batch_digest(np.array([1.5, 0.5], np.float32))
    assert batch_digest(torch.empty(0, 3)) == 0
    assert batch_digest(torch.empty(2, 0)) != 0


@pytest.mark.parametrize(
    "ids", ["text", b"bytes", {"input_ids": [1]}, [1.5], [None], [[1]], np.array([None])], ids=repr
)
def test_what_tells_no_samples_apart_is_refused(ids):
    with pytest.raises(InvalidInputError):
        batch_digest(ids)
