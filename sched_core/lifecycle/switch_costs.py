"""The costs of switches: learnt from the ranks' reports, predicted for the next switch.

A switch is a suspend and the resume that follows. Waiting for a boundary is not part of it: the job makes
progress meanwhile. The fit itself is in ``switch_cost_model``. A replay of the journal gives the same costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.switch_cost_model import CostModel, Estimate, Half, State, costs_s
from gpuslice.types import DeviceName
from gpuslice.wire import Resumed, Suspended

from .events import Notice, Plain
from .relocation_costs import RelocationCosts


class SwitchCosts:
    """The measured and predicted costs of one scheduler's switches.

    Parameters
    ----------
    share
        The largest share of time that switching may take; 0: no limit.
    devices
        The devices, in the order of the numbers in leases.

    Attributes
    ----------
    share, devices
        As above; they may be changed.
    relocations
        The costs of moves to other nodes.
    """

    def __init__(self, share: float, devices: Sequence[DeviceName] = ()) -> None:
        self.relocations = RelocationCosts()
        self.share = share
        self.devices = devices
        self._costs = CostModel()
        #: The state that each rank moved at its last suspend, by job. Only of jobs that have not ended.
        self._states: dict[str, dict[int, State]] = {}
        #: The largest state that any rank moves. None: it must be looked up again.
        self._most: State | None = State(0)
        #: The present switch of each job: seconds by rank and stage; ``_moved``: True if its device changed.
        self._present: dict[str, dict[int, dict[str, float]]] = {}
        self._moved: dict[str, bool] = {}

    def predict_s(self, job: Gang) -> float | None:
        """Return the predicted seconds of suspending and resuming ``job``. None before its first suspend."""
        estimate = self.predict(job)
        return None if estimate is None else estimate.seconds

    def predict(self, job: Gang, devices: Sequence[int] = ()) -> Estimate | None:
        """Return the predicted cost of suspending and resuming ``job``: of a gang, the costliest rank's.

        Parameters
        ----------
        devices
            The devices to resume on, in rank order. Empty: the present devices, or the last ones.
        """
        states = self._states.get(job.id)
        if states is None:
            return None
        found = [self._of_rank(job, rank, state, devices) for rank, state in states.items()]
        return max(found, key=lambda estimate: estimate.seconds)

    def expected_s(self, job: Gang, devices: Sequence[int]) -> float | None:
        """Return the expected cost in seconds of moving ``job`` to ``devices``. None if nothing is known.

        On the same node, a job that was never suspended counts like the largest state of any rank.
        """
        present = job.lease or job.home
        if present and self._nodes(devices) != self._nodes(present):
            return self.relocations.expected_s(job)
        estimate = self.predict(job, devices)
        if estimate is None and self._states:
            estimate = self._costs.switch(State(*self._largest()[:2]))
        return None if estimate is None else estimate.seconds

    def state_bytes(self, job: Gang) -> int:
        """Return the bytes of the state that all ranks of ``job`` moved at its last suspend; 0: not known."""
        return sum(state.nbytes for state in self._states.get(job.id, {}).values())

    def rank_bytes(self, job: Gang, rank: int) -> int:
        """Return the bytes of the state that a rank of ``job`` moved at its last suspend; 0: not known."""
        state = self._states.get(job.id, {}).get(rank)
        return 0 if state is None else state.nbytes

    def pays_after_s(self, cost_s: float) -> float:
        """Return how long a job must stay where it is so that ``cost_s`` is its share of the time."""
        return cost_s / self.share if self.share else 0.0

    def _nodes(self, devices: Sequence[int]) -> tuple[str, ...]:
        """Return the node of each of ``devices``."""
        return tuple(self.devices[device].node for device in devices if device < len(self.devices))

    def _largest(self) -> State:
        """Return the largest state that any rank moves."""
        if self._most is None:
            self._most = max(state for states in self._states.values() for state in states.values())
        return self._most

    def _of_rank(self, job: Gang, rank: int, state: State, devices: Sequence[int]) -> Estimate:
        present = state._replace(device=self._name(job.lease, rank) or state.device)
        target = self._name(devices, rank) or present.device
        moves = target != present.device
        found = self._costs.migration(present, target) if moves else self._costs.switch(present)
        return Estimate(0.0, None) if found is None else found

    def least_slice_s(self) -> float:
        """Return how long a slice must last so that switching any job stays below its share of the time."""
        if not self.share or not self._states:
            return 0.0
        # On whichever device: not even the scheduler knows where the next slice will be.
        estimate = self._costs.switch(State(*self._largest()[:2]))
        return 0.0 if estimate is None else estimate.seconds / self.share

    def begun(self, job: Gang) -> None:
        """Note that a switch of ``job`` begins, and predict its cost to the job's next devices."""
        estimate = self.predict(job, job.wanted)
        job.switch.begin(*(None, None) if estimate is None else (estimate.seconds, estimate.error_s))
        self._present[job.id] = {}
        self._moved[job.id] = False

    def parked(self, job: Gang, rank: int, message: Suspended) -> None:
        """Learn from the report of a rank that has been suspended."""
        state = State(message.nbytes, message.tensors, self._name(job.lease, rank), message.route)
        self._costs.learn(Half.SUSPEND, state, message.stages_s)
        states = self._states.setdefault(job.id, {})
        if self._most is not None and (state >= self._most or states.get(rank) == self._most):
            self._most = state if state >= self._most else None
        states[rank] = state
        self._add(job, rank, message)

    def resumed(self, job: Gang, rank: int, message: Resumed) -> None:
        """Learn from the report of a rank that is back on a device, if it had state to bring back."""
        if not message.stages_s:
            return
        left = self._states.get(job.id, {}).get(rank, State(0))
        device = self._name(job.lease, rank)
        half = Half.RESUME if device == left.device else Half.MIGRATION
        self._moved[job.id] = self._moved.get(job.id, False) or half is Half.MIGRATION
        self._costs.learn(half, left._replace(device=device), message.stages_s)
        self._add(job, rank, message)

    def ended(self, job: Gang) -> Notice | None:
        """Note that ``job`` runs again; add up the switch's cost and return a notice of it.

        Return None if there was no switch. The slowest rank's stages count.
        """
        ranks = self._present.pop(job.id, None)
        moved = self._moved.pop(job.id, False)
        if not ranks:
            return None
        slowest = max(ranks.values(), key=lambda stages_s: sum(stages_s.values()))
        job.switch.end(sum(slowest.values()))
        states = self._states.get(job.id, {})
        details: dict[str, Plain] = {
            **slowest,
            "predicted_s": job.switch.predicted_s,
            "predicted_error_s": job.switch.error_s,
            "actual_s": job.switch.cost_s,
            "bytes": sum(state.nbytes for state in states.values()),
            "tensors": sum(state.tensors for state in states.values()),
            "route": next((state.route for state in states.values()), ""),
            "device": ",".join(self._name(job.lease, rank) for rank in range(len(job.lease))),
            "migrated": moved,
        }
        return Notice("switched", job.id, details)

    def forget(self, job: Gang) -> None:
        """Drop what is known of the state of ``job``, which has none any more."""
        if self._most in self._states.pop(job.id, {}).values():
            self._most = None
        self._present.pop(job.id, None)
        self._moved.pop(job.id, None)

    def _add(self, job: Gang, rank: int, message: Suspended | Resumed) -> None:
        stages_s = self._present.setdefault(job.id, {}).setdefault(rank, {})
        for name, seconds in costs_s(message.stages_s).items():
            stages_s[name] = stages_s.get(name, 0.0) + seconds

    def _name(self, devices: Sequence[int], rank: int) -> str:
        """Return the name of the device of ``rank``; empty if that is not known."""
        if rank < len(devices) and devices[rank] < len(self.devices):
            return str(self.devices[devices[rank]])
        return ""
