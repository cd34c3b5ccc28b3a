"""What becomes of each store call of a simulated process: drawn, and counted by kind."""

from __future__ import annotations

import builtins
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptstore.errors import UnavailableError
from ckptstore.objectstore.port import ObjectInfo, ObjectStore
from ckptstore.testing.crash import Killed
from ckptstore.testing.faults import Fault, FaultyStore
from ckptstore.testing.tapped import Act, Call
from ckptstore.testing.turns import TurnClock, Turns

T = TypeVar("T")

DAY_SECONDS = 86_400.0
BUSY_STATUS = 503
LONGEST_OUTAGE_SECONDS = 150.0
LONGEST_TIME_OUT_SECONDS = 10.0
"""How long a process waits for one answer in an outage."""
LIKELIER_IN_THE_LOG = 60
"""So many times as often an outage begins with an append: then its outcome may stay unknown."""
LONGEST_RETRY_AFTER_SECONDS = 20.0
PAGE_KEYS = 5

THROTTLED, OUTAGE, STOPPED, CLOCK_STEP = "throttled", "outage", "stopped for long", "clock step"
DIES = ("dies before", "dies after", "dies, it arrives later")
DEADLIER = 4
"""So many times as often in a write as in a read: there a death leaves most."""
SLOW_LISTING = "slow listing"
HINT_DELETED, HINT_CORRUPTED, BIT_FLIPPED = "hint deleted", "hint corrupted", "bit flipped"
RETRIED = Fault.RETRIED.name
OF_WRITES = (Fault.UNSENT.name, Fault.LOST_REPLY.name, Fault.LATE.name, Fault.DUPLICATED.name, RETRIED)
"""These mean nothing where nothing is changed; such a call is refused or not."""
SILENT = (Fault.UNSENT, Fault.LOST_REPLY, Fault.LATE)
"""What becomes of the requests in an outage: no reply comes."""
OF_CALLS = (
    "REFUSED",
    "DENIED",
    "UNSENT",
    "LOST_REPLY",
    "LATE",
    "RETRIED",
    "DUPLICATED",
    THROTTLED,
    OUTAGE,
    STOPPED,
    CLOCK_STEP,
)

STRENGTHS = (0.2, 0.5, 1.0)
RATES = {
    Fault.REFUSED.name: 0.01,
    Fault.DENIED.name: 0.002,
    Fault.UNSENT.name: 0.06,
    Fault.LOST_REPLY.name: 0.12,
    Fault.LATE.name: 0.12,
    RETRIED: 0.15,
    Fault.DUPLICATED.name: 0.12,
    THROTTLED: 0.02,
    OUTAGE: 0.005,
    STOPPED: 0.008,
    CLOCK_STEP: 0.005,
    DIES[0]: 0.002,
    DIES[1]: 0.005,
    DIES[2]: 0.005,
    SLOW_LISTING: 0.7,
    HINT_DELETED: 0.005,
    HINT_CORRUPTED: 0.005,
    BIT_FLIPPED: 0.002,
}
"""How probable each kind is at a call, where the weather has it at all."""


@dataclass
class Weather:
    """How often what goes wrong in one simulation, and what did.

    Args:
        rates: By kind.
        faults: What happened, by kind.
        kills: Where processes died: operation, kind of key, and how.
        is_calm: Nothing goes wrong any more.
    """

    rates: dict[str, float]
    faults: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    is_calm: bool = False

    @classmethod
    def drawn(cls, chance: random.Random) -> Weather:
        """Return weather in which some kinds occur, some of them often: histories differ more that way."""
        strength = chance.choice(STRENGTHS)
        return cls({kind: rate * strength * chance.choice((0, 0, 1, 1, 3)) for kind, rate in RATES.items()})

    def draw(self, call: Call, chance: random.Random) -> str | None:
        """Return what becomes of a call, or None: it goes well."""
        if self.is_calm:
            return None
        left = chance.random()
        for kind in OF_CALLS:
            if kind in OF_WRITES and not (call.creates if kind == RETRIED else call.writes):
                continue
            in_the_log = kind == OUTAGE and call.creates and call.key.startswith("log/")
            left -= self.rates[kind] * (LIKELIER_IN_THE_LOG if in_the_log else 1)
            if left < 0:
                return kind
        return None

    def happens(self, kind: str, chance: random.Random) -> bool:
        """Draw whether `kind` happens."""
        return not self.is_calm and chance.random() < self.rates[kind]


class StormyStore(FaultyStore):
    """What one process sees of the store. Before each call others go on; then the weather decides.

    Args:
        inner: The store.
        turns: Who goes on.
        clock: The process's own; it may be set.
        weather: What goes wrong.
    """

    def __init__(self, inner: ObjectStore, *, turns: Turns, clock: TurnClock, weather: Weather) -> None:
        super().__init__(inner, self._drawn)
        self._turns, self._clock, self._weather = turns, clock, weather
        self._silent_until, self._silent_about = 0.0, ""

    def pass_on(self, operation: str, key: str, act: Callable[[], T], *, creates: bool = False) -> T:
        """Let others go on first."""
        self._turns.wait()
        return super().pass_on(operation, key, act, creates=creates)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """List, perhaps page by page, while others write."""
        if not self._weather.happens(SLOW_LISTING, self._turns.chance):
            yield from super().list(prefix, after=after)
            return
        self._weather.faults[SLOW_LISTING] += 1
        while page := self._page(prefix, after):
            yield from page
            after = page[-1].key

    def _page(self, prefix: str, after: str | None) -> builtins.list[ObjectInfo]:
        size = self._turns.chance.randint(1, PAGE_KEYS)
        return self.pass_on("list", prefix, lambda: [*self.inner.list(prefix, after=after)][:size])

    def _drawn(self, call: Call) -> Fault | None:
        chance = self._turns.chance
        silent = self._turns.seconds < self._silent_until and call.key.startswith(self._silent_about)
        if silent and not self._weather.is_calm:
            self._turns.wait(chance.uniform(0, LONGEST_TIME_OUT_SECONDS))
            return chance.choice(SILENT)
        kind = self._weather.draw(call, chance)
        if kind is None:
            return None
        self._weather.faults[kind] += 1
        if kind == THROTTLED:
            asked = chance.uniform(0, LONGEST_RETRY_AFTER_SECONDS)
            raise UnavailableError(f"{call.key}: slow down.", status=BUSY_STATUS, retry_after_seconds=asked)
        if kind == OUTAGE:
            self._silent_until = self._turns.seconds + chance.uniform(0, LONGEST_OUTAGE_SECONDS)
            self._silent_about = chance.choice(("", "log/"))  # a part of the keys, as a partition of a bucket is
            return chance.choice(SILENT)
        if kind == STOPPED:
            self._turns.wait(chance.uniform(1, DAY_SECONDS))
        if kind == CLOCK_STEP:
            self._clock.off_seconds += chance.choice((-DAY_SECONDS, DAY_SECONDS))
        return Fault[kind] if kind in Fault.__members__ else None

    def _meet(self, call: Call, act: Act) -> Any:
        """Let the process die in the call, or go on as the weather says."""
        actor, fate = self._turns.current, self._fate(call)
        if fate is None or actor is None or actor.killed:
            return super()._meet(call, act)
        self._weather.faults[fate] += 1
        self._weather.kills[f"{call.operation} {key_kind(call.key)}: {fate}"] += 1
        actor.killed = True
        if fate == DIES[1]:
            act()
        if fate == DIES[2]:
            self.under_way.append(act)
        raise Killed(f"{actor.name} in {call.operation} of {call.key}")

    def _fate(self, call: Call) -> str | None:
        chance, fates = self._turns.chance, DIES if call.writes else DIES[:1]
        times = DEADLIER if call.writes or call.operation in ("write", "open_upload") else 1
        return next((kind for kind in fates for _ in range(times) if self._weather.happens(kind, chance)), None)


def key_kind(key: str) -> str:
    """Return what kind of object a key names: `log`, `shard`, `part` and so on."""
    folder, _, rest = key.partition("/")
    if folder != "data":
        return folder
    name = rest.rpartition("/")[2]
    return name.partition("-")[0].partition(".")[0] or folder
