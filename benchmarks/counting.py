"""What goes over the wire: requests by method, and the bytes of their bodies and of the answers'.

It is counted by the proxy, in a run of its own, so that counting does not slow down what is timed.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from benchmarks.child import BEGIN, JobFailedError, run
from benchmarks.rounds import Bucket, Plan
from localstack.faults import Seen
from localstack.proxy import Proxy
from localstack.wire import Head

BEGIN_PATH = "/the-clock-starts"


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

    def look_at(self, head: Head) -> Seen:
        """Note a request. The one that says so makes it forget all that came until now, itself too."""
        seen = super().look_at(head)
        if seen.path == BEGIN_PATH:
            with self._counting:
                self.bytes = 0
                self.seen.clear()
        return seen

    def counted(self) -> dict[str, Any]:
        """Return what came since."""
        methods = Counter(each.method for each in self.seen)
        return {"requests": sum(methods.values()), "requests_by_method": dict(methods), "wire_bytes": self.bytes}


def counted(plan: Plan, place: Bucket, *, loads: bool = False) -> dict[str, dict[str, Any]]:
    """Return by peer what one run of it asks for, from where the clock would start.

    Args:
        plan: What is run.
        place: Where.
        loads: It is saved before, and that is not counted.
    """
    found: dict[str, dict[str, Any]] = {}
    for peer in plan.peers:
        root = place.root(int(plan.size))
        with CountingProxy(place.server.endpoint) as proxy:
            behind = {**place.environment, "AWS_ENDPOINT_URL": proxy.endpoint, BEGIN: proxy.endpoint + BEGIN_PATH}
            try:
                if loads:
                    run(plan.saving_job(peer, root), environment=place.environment)
                run(plan.job(peer, root), environment=behind, timeout_seconds=plan.timeout_seconds)
            except JobFailedError as error:
                print(f"{peer} is not counted: {error}")
                continue
            found[peer] = proxy.counted()
    return found
