"""The order of an epoch: a shuffle that can be asked for any part of itself, and that never changes.

It is the swap-or-not shuffle (Hoang, Morris, Rogaway: An Enciphering Scheme Based on a Card Shuffle, CRYPTO 2012), in
whole numbers of 64 bits that wrap around. To find which sample stands at place x of n, 64 rounds are gone through; in
each, x has one partner, (pivot - x) mod n, whose partner is x. Both change places, or both stay: a bit decides that is
hashed from the larger of the two. So each round, and all together, map the n places onto the n samples, one to one.

The pivot (mod n) and the key of each round are two little-endian numbers of 64 bits from BLAKE3's extended output over
the ASCII text `NAME <length> <seed> <epoch>`. The bit is the highest one of `mixed(larger xor key)`, where
`mixed` is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).

Nothing of it is a random generator of Python, NumPy or torch, and no order is held in memory: 10^8 samples take as much
as the places that are asked for.
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

NAME = "ckptstore order/1"
"""What this order is called, in states too. Another order gets another name."""

ROUNDS = 64
MAX_LENGTH = 2**62
"""How long an order may be: places and their sums stay within 64 bits."""

_U64 = np.uint64


class EpochOrder:
    """The shuffled order of one epoch.

    Args:
        length: How many samples there are, from 1 to 2**62.
        seed: Of the run, from 0 on.
        epoch: From 0 on.
    """

    def __init__(self, *, length: int, seed: int, epoch: int) -> None:
        text = f"{NAME} {length} {seed} {epoch}".encode("ascii")
        numbers = np.frombuffer(blake3(text).digest(length=ROUNDS * 16), dtype="<u8").astype(_U64).reshape(ROUNDS, 2)
        self._length = _U64(length)
        self._rounds = [(pivot % self._length, key) for pivot, key in numbers]

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at the places from `start` to before `stop`, shape [stop - start]."""
        return self.of(np.arange(start, stop, dtype=np.int64))

    def of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample at each of `places`, in a new array of the same shape."""
        x = places.astype(_U64)
        for pivot, key in self._rounds:
            partner = pivot - x  # below 0 it wraps around, and adding the length wraps back
            partner = np.minimum(partner, partner + self._length)
            bits = _mixed(np.maximum(x, partner) ^ key) >> _U64(63)
            x = np.where(bits.astype(np.bool_), partner, x)
        return x.astype(np.int64)


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> _U64(27))) * _U64(0x94D049BB133111EB)
    return value ^ (value >> _U64(31))
