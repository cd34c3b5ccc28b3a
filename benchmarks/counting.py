"""What goes over the wire: requests by method, and the bytes of their bodies and of the answers'.

It is counted by the proxy, in a run of its own, so that counting does not slow down what is timed.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from benchmarks.child import JobFailedError, run
from benchmarks.rounds import Bucket, Plan
from localstack.proxy import Proxy


class CountingProxy(Proxy):
    """Passes everything on and counts."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.bytes = 0
        self._counting = threading.Lock()

    def wait_for_turn(self, size: int) -> None:
        """Count; nothing waits. Every piece of a body comes by here, in either direction."""
        with self._counting:
            self.bytes += size

    def begin(self) -> None:
        """Forget what came until now."""
        with self._counting:
            self.bytes = 0
            self.seen.clear()

    def counted(self) -> dict[str, Any]:
        """Return what came since."""
        methods = Counter(each.method for each in self.seen)
        return {"requests": sum(methods.values()), "requests_by_method": dict(methods), "wire_bytes": self.bytes}


def counted(plan: Plan, place: Bucket, *, loads: bool = False) -> dict[str, dict[str, Any]]:
    """Return by peer what one run of it asks for. What it does before the clock starts (little) is counted too.

    Args:
        plan: What is run.
        place: Where.
        loads: It is saved before, and that is not counted.
    """
    found: dict[str, dict[str, Any]] = {}
    for peer in plan.peers:
        root = place.root(int(plan.size))
        with CountingProxy(place.server.endpoint) as proxy:
            behind = {**place.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
            try:
                if loads:
                    run(plan.saving_job(peer, root), environment=place.environment)
                proxy.begin()
                run(plan.job(peer, root), environment=behind, timeout_seconds=plan.timeout_seconds)
            except JobFailedError as error:
                print(f"{peer} is not counted: {error}")
                continue
            found[peer] = proxy.counted()
    return found
