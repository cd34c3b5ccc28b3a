import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `scenes`, here and in the processes of a gang


@pytest.fixture(scope="session")
def client_of():
    """Return a function that returns a server's plain client: one for all tests, because making it takes its time."""
    clients = {}

    def client_of(server):
        if server not in clients:
            clients[server] = server.client()
        return clients[server]

    yield client_of
    for client in clients.values():
        client.close()


@pytest.fixture
def scene_at(proxied, client_of):
    """Return a function that returns a run behind a proxy, at a place."""
    from scenes import Scene  # noqa: PLC0415  (torch is for those who ask for it)

    with contextlib.ExitStack() as rules:

        def scene_at(place):
            scene = Scene(place, proxied(place.server), client_of(place.server))
            rules.enter_context(scene.rules)
            return scene

        yield scene_at


@pytest.fixture
def scene(place, scene_at):
    """A run behind a proxy, at the place that the test asks for."""
    return scene_at(place)


@pytest.fixture
def by_the_book():
    """Google's storage as its manual has it, with nothing in it. See `gcs_by_the_book.Gcs`."""
    from book import BookServer  # noqa: PLC0415  (found by the line above)
    from gcs_by_the_book import Gcs  # noqa: PLC0415  (the same)

    with Gcs() as gcs:
        yield BookServer(gcs)
        assert not gcs.wrong
