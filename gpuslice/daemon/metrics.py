"""The scheduler's numbers for Prometheus.

They are counted as events come, those of the journal too: counters go on where the last scheduler stopped.
Names follow prometheus.io: base units, ``_total`` for counters; the only labels that grow with use are
``job``, which goes with its job's end, and ``user``, which has at most so many values (``_MOST_USERS``).
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

from gpuslice.daemon.node_reports import Reading
from gpuslice.errors import EnvironmentUnusableError
from gpuslice.sched_core.core.core import Core
from gpuslice.sched_core.jobs.states import JobState
from gpuslice.sched_core.lifecycle.events import (
    Event,
    NodeFound,
    NodeLost,
    Noted,
    Reported,
    SettingsChanged,
    submitted,
)
from gpuslice.sched_core.live.job_history import JobHistory, Phase
from gpuslice.version import __version__
from gpuslice.wire import Resumed, Suspended

ADDRESS = "127.0.0.1"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SUFFIX = "_s"
#: So many stages have numbers of their own; more than any rank of ours reports.
_MOST_STAGES = 64
#: So many users have numbers of their own. The rest are counted together.
_MOST_USERS = 200
_OTHERS = "others"


_NODES = (
    ("gpuslice_node_silent_seconds", "Time since the node's agent was last heard."),
    ("gpuslice_node_ramdisk_free_bytes", "Free room of the file system of the node's RAM disk."),
    ("gpuslice_node_clock_difference_seconds", "How far the node's clock is ahead of the scheduler's."),
)


class NodeMetrics:
    """What is known of the nodes, read whenever somebody asks for the metrics.

    Parameters
    ----------
    read
        Returns it; called in another thread.
    """

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def describe(self) -> list[GaugeMetricFamily]:
        """Return the metrics without values: nothing is read when they are registered."""
        return [GaugeMetricFamily(name, text, labels=["node"]) for name, text in _NODES]

    def collect(self) -> list[GaugeMetricFamily]:
        """Return what is known now."""
        found = self.describe()
        for node, *values in self._read():
            for family, value in zip(found, values, strict=True):
                if value is not None:
                    family.add_metric([node], value)
        return found


class Metrics:
    """The Prometheus metrics of one scheduler core. Call `note` after the job history's.

    ``nodes`` returns what is known of the nodes; it is called in another thread.
    """

    def __init__(
        self,
        core: Core,
        job_history: JobHistory,
        policy: str,
        nodes: Callable[[], Iterable[Reading]] = tuple,
    ) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(NodeMetrics(nodes))
        self._core = core
        self._job_history = job_history
        self._stages: set[str] = set()
        #: Steps, service, switches and blackout of each job that are counted already.
        self._counted: dict[str, tuple[int, float, int, float]] = {}
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        about = ["version", "policy"]
        self._build = Gauge("gpuslice_build_info", "Version and policy.", about, registry=registry)
        self._build.labels(__version__, policy).set(1)
        self._jobs = Gauge("gpuslice_queue_jobs", "Jobs by state.", ["state"], registry=registry)
        for state in JobState:
            self._jobs.labels(state.value).set(0)
        self._on = Gauge("gpuslice_device_jobs", "Jobs on a device.", ["device"], registry=registry)
        for name in core.devices:
            self._on.labels(str(name)).set(0)
        up = Gauge("gpuslice_node_up", "1 unless the node is lost.", ["node"], registry=registry)
        self._up = {node: up.labels(node or "here") for node in {name.node for name in core.devices}}
        for gauge in self._up.values():
            gauge.set(1)
        self._submitted = Counter("gpuslice_jobs_submitted_total", "Jobs accepted.", registry=registry)
        self._ended = Counter("gpuslice_jobs_ended_total", "Jobs ended.", ["state"], registry=registry)
        self._missed = Counter(
            "gpuslice_deadlines_missed_total", "Jobs that had not succeeded by theirs.", registry=registry
        )
        self._switches = Counter("gpuslice_switches_total", "Suspends with their resumes.", registry=registry)
        self._blackout = Histogram(
            "gpuslice_switch_blackout_seconds",
            "What a switch costs its job.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._suspend, self._resume = (
            Histogram(
                f"gpuslice_{what}_duration_seconds",
                f"Stages of a {what}, per rank.",
                ["stage"],
                buckets=_SECONDS,
                registry=registry,
            )
            for what in ("suspend", "resume")
        )
        self._bytes = Counter(
            "gpuslice_snapshot_bytes_total", "Copied to the RAM disk.", ["direction"], registry=registry
        )
        self._steps = Counter(
            "gpuslice_job_progress_steps_total", "Optimizer steps.", ["job"], registry=registry
        )
        self._service = Counter(
            "gpuslice_job_attained_service_seconds_total", "Devices x time.", ["job"], registry=registry
        )
        self._user_jobs = Gauge(
            "gpuslice_user_jobs", "Jobs by user and state.", ["user", "state"], registry=registry
        )
        self._user_service = Counter(
            "gpuslice_user_service_seconds_total", "Devices x time by user.", ["user"], registry=registry
        )
        self._waiting = Gauge(
            "gpuslice_waiting_jobs",
            "Jobs that do not train, by user and reason.",
            ["user", "reason"],
            registry=registry,
        )
        self._users: set[str] = set()
        #: Attained service of each job that is counted for its user already.
        self._served: dict[str, float] = {}
        #: The labels of ``gpuslice_waiting_jobs`` so far.
        self._reasons: set[tuple[str, str]] = set()

    def note(self, event: Event, now: float, ended: Sequence[Phase]) -> None:
        """Count ``event``, and the phases of jobs that have ended with it."""
        if tenants := [spec.tenant for spec, _ in submitted(event)]:
            self._submitted.inc(len(tenants))
            self._jobs.labels(JobState.QUEUED.value).inc(len(tenants))
            for tenant, count in Tally(tenants).items():
                self._user_jobs.labels(self._user(tenant), JobState.QUEUED.value).inc(count)
        elif isinstance(event, Reported):
            self._report(self._job_history.counted)
            self._job(event.job, now)
        elif isinstance(event, Noted) and event.what == "deadline_missed":
            self._missed.inc()
        elif isinstance(event, SettingsChanged):
            self._change_settings(event)
        elif isinstance(event, NodeLost | NodeFound):
            self._up[event.node].set(isinstance(event, NodeFound))
        for phase in ended:
            self._change(phase, now)

    def waiting(self, cases: Mapping[str, str]) -> None:
        """Count the jobs that do not train by user and reason: the name of the case of ``why``."""
        users = {job: self._user(self._core.jobs[job].spec.tenant) for job in cases}
        counts = Tally((users[job], case or "unknown") for job, case in cases.items())
        self._reasons |= counts.keys()
        for user, reason in self._reasons:
            self._waiting.labels(user, reason).set(counts[user, reason])

    def _user(self, tenant: str) -> str:
        """Return the label of ``tenant``."""
        if tenant not in self._users and len(self._users) >= _MOST_USERS:
            return _OTHERS
        self._users.add(tenant)
        return tenant

    def _change_settings(self, event: SettingsChanged) -> None:
        if event.policy is not None:
            self._build.clear()
            self._build.labels(__version__, event.policy).set(1)
        for name in event.devices or ():
            self._on.labels(name)

    def _change(self, phase: Phase, now: float) -> None:
        present = self._job_history.accounts[phase.job].phase
        user = self._user(self._core.jobs[phase.job].spec.tenant)
        if present.state is not phase.state:
            self._jobs.labels(phase.state.value).dec()
            self._jobs.labels(present.state.value).inc()
            self._user_jobs.labels(user, phase.state.value).dec()
            self._user_jobs.labels(user, present.state.value).inc()
        for device in {*phase.devices, *present.devices}:
            self._on.labels(str(self._core.devices[device])).set(len(self._core.state.occupants[device]))
        self._job(phase.job, now)
        if present.state.ended and not phase.state.ended:
            self._ended.labels(present.state.value).inc()
            self._forget(phase.job)

    def _report(self, message: Suspended | Resumed | None) -> None:
        if message is None:
            return
        stages = self._suspend if isinstance(message, Suspended) else self._resume
        for stage, seconds in message.stages_s.items():
            if stage not in self._stages:
                if len(self._stages) >= _MOST_STAGES:
                    continue  # a rank that makes up names
                self._stages.add(stage)
            stages.labels(stage.removesuffix(_SUFFIX)).observe(seconds)
        if isinstance(message, Suspended):
            self._bytes.labels("out").inc(message.nbytes)

    def _job(self, name: str, now: float) -> None:
        job = self._core.jobs[name]
        served_s = job.service_at(now)
        more_s = max(0.0, served_s - self._served.get(name, 0.0))
        self._user_service.labels(self._user(job.spec.tenant)).inc(more_s)
        self._served[name] = served_s
        if job.state.ended:
            return
        account = self._job_history.accounts[name]
        steps, service_s, switches, blackout_s = self._counted.get(name, (0, 0.0, 0, 0.0))
        present = (
            job.steps,
            served_s,
            account.switches,
            account.blackout_s,
        )
        # A job that was started again begins anew; what it had done before stays counted.
        self._steps.labels(name).inc(max(0, present[0] - steps))
        self._service.labels(name).inc(max(0.0, present[1] - service_s))
        if account.switches > switches:
            self._switches.inc()
            self._blackout.observe(account.blackout_s - blackout_s)
        self._counted[name] = present

    def _forget(self, name: str) -> None:
        if self._counted.pop(name, None) is not None:
            self._steps.remove(name)
            self._service.remove(name)


@contextmanager
def served(metrics: Metrics, port: int) -> Iterator[int]:
    """Serve ``metrics`` at ``port`` of 127.0.0.1 (0: any free port), and yield the port.

    Raises
    ------
    EnvironmentUnusableError
        If the port cannot be had.
    """
    try:
        server, thread = prometheus_client.start_http_server(port, ADDRESS, metrics.registry)
    except OSError as error:
        raise EnvironmentUnusableError(
            f"cannot serve metrics at port {port}: {error.strerror}", "choose another --metrics-port"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
