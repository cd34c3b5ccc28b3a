"""Free ports on the loopback."""

from __future__ import annotations

import random
import socket

# Below the ports that the system hands out to outgoing connections, also with the distance added.
FIRST, LAST = 10_240, 22_000
GRPC_DISTANCE = 10_000  # SeaweedFS listens for gRPC this far above each of its ports
TRIES = 1_000


def free_port_pairs(count: int) -> list[int]:
    """Return `count` ports that are free together with the ports `GRPC_DISTANCE` above them, a moment ago at least.

    Raises:
        OSError: There are none.
    """
    found: list[int] = []
    for _ in range(TRIES):
        port = random.randint(FIRST, LAST)  # noqa: S311  (no secret)
        if port not in found and _is_free(port) and _is_free(port + GRPC_DISTANCE):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"No {count} free pairs of ports between {FIRST} and {LAST}.")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
