import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `scenes`, here and in the processes of a gang


@pytest.fixture
def scene(place, proxied):
    """A run behind a proxy, on the place that the test asks for."""
    from scenes import Scene  # noqa: PLC0415  (torch is for those who ask for it)

    made = Scene(place, proxied(place.server))
    with made.rules:
        yield made
