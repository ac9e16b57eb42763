"""What all of a world shares: time, chance, who has which state, and the record of what happens."""

from __future__ import annotations

from dataclasses import dataclass, field

from .draws import Draws
from .loop import Act, Line, Loop
from .orders import Orders
from .record import Record
from .rooms import Rooms
from .scenario import Scenario
from .states import States

#: How long a message takes where nothing goes wrong.
DELAY_S = 0.01


@dataclass
class Ground:
    """See above. Everything that goes wrong is asked for here, and nothing does once all is calm."""

    scenario: Scenario
    loop: Loop = field(default_factory=Loop)

    def __post_init__(self) -> None:
        self.draws = Draws(self.scenario.seed)
        self.record, self.orders = Record(self.loop), Orders(self.loop)
        self.states = States()
        self.rooms = Rooms(self.scenario, self.loop, self.states)

    @property
    def calm(self) -> bool:
        """True once all do as they are told."""
        return not self.scenario.faults or self.loop.now_s >= self.scenario.calm_s

    def fault(self, share: float, *key: object) -> bool:
        """Return True if that fault happens."""
        return not self.calm and self.draws.chance(share, *key)

    def unless_calm(self, after_s: float, act: Act) -> None:
        """Do ``act`` after a while, unless nothing goes wrong any more."""
        self.loop.after(after_s, lambda: None if self.calm else act())

    def lasts_s(self, usual_s: float, *key: object) -> float:
        """Return how long something takes that takes ``usual_s`` as a rule: now and then much longer."""
        if not self.scenario.faults:
            return usual_s
        usual_s *= self.draws.between(0.5, 1.5, *key, "lasts")
        if self.fault(0.04, *key, "late"):
            usual_s += self.draws.between(1.0, 15.0, *key, "by")
        return usual_s

    def line(self, *key: object) -> Line:
        """Return a line whose messages take as long as chance wants."""
        return Line(self.loop, lambda number: self._delay_s(*key, number))

    def _delay_s(self, *key: object) -> float:
        if not self.scenario.faults:
            return DELAY_S
        most_s = 1.0 if self.fault(self.scenario.profile.slow, *key, "slow") else 4 * DELAY_S
        return self.draws.between(0.0, most_s, *key, "delay")
