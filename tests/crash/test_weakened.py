"""Each weakened protocol is caught, by the invariant that it breaks."""

from __future__ import annotations

import pytest

from ckptstore.testing.weakened import WEAKENED

SEEDS = range(80)


@pytest.mark.parametrize("weakened", WEAKENED, ids=lambda weakened: weakened.name)
def test_a_weakened_protocol_is_caught(weakened):
    found = weakened.caught(SEEDS)
    assert found is not None
    print(found)  # noqa: T201  (which seed)
