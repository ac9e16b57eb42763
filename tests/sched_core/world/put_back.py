"""Faults that the core once had, each of a pair of features, put back into the core of today.

A world that does not notice them proves nothing. Each is one text of the core replaced by what stood there
before; when that text is not found any more, the fault is to be described anew. Three faults that were here
cannot be put back, or do no harm: what a job that has ended is to have is computed (``jobs.targets``), a job
is shown to the policy or withdrawn once an event (``eligibility``), and a command that is planned for a
silent node is taken back (``absences``).
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gpuslice.sched_core.allocation import homes, trials
from gpuslice.sched_core.allocation.moves import Moves
from gpuslice.sched_core.jobs.gang import Gang
from gpuslice.sched_core.lifecycle import reports, restarts, steps, timeouts
from gpuslice.sched_core.lifecycle.rank_processes import RankProcesses
from gpuslice.sched_core.lifecycle.rank_reports import RankReports
from gpuslice.sched_core.live import job_processes


class Fault(NamedTuple):
    """A fault, and the worlds that find it.

    Attributes
    ----------
    pair
        Which two features it is of.
    mended
        What was said when it was mended.
    owner, name
        The function that has it: a class or module, and its name there.
    now, before
        The text of today, and the one that is put back.
    seed
        Of the world that finds it.
    """

    pair: str
    mended: str
    owner: Any
    name: str
    now: str
    before: str
    seed: int


FAULTS = (
    Fault(
        "trial x start on another node",
        "Try a job once whose processes are started on another node for its trial: it went from node to node"
        " for ever",
        trials.Trials,
        "enter",
        "if job.id not in self._trying:",
        "if True:",
        seed=1233,
    ),
    Fault(
        "trial x lost place",
        "Go on with a trial that was broken off where its job is: sent to another node that job waited for"
        " ever, and who lends with it",
        trials.Trials,
        "_choose",
        "if job.width:",
        "if False:",
        seed=1242,
    ),
    Fault(
        "lending x move",
        "See whether a job that lends its devices to a trial can go where it is moved meanwhile",
        Moves,
        "granted",
        "on_its_way = job.lent or job.relocating",
        "on_its_way = False",
        seed=2800,
    ),
    Fault(
        "exchange x state that stays on its node",
        "Let a job that has to make room for another on a second node stay on its own if it cannot leave it:"
        " it waited for ever with a device",
        Moves,
        "carry_out",
        "self.granted(moved, moved=True)",
        "pass",
        seed=620,
    ),
    Fault(
        "state that cannot be sent x another one",
        "Let jobs that wait for each other's nodes while nothing can be sent both go on where they are",
        homes.Homes,
        "_is_home",
        "holder is job or self._waits(holder)",
        "holder is job",
        seed=110,
    ),
    Fault(
        "start on another node x lease",
        "Let no job on a device while its processes are being ended because it goes to another node",
        steps,
        "_enter",
        "if job.relocating:",
        "if False:",
        seed=89,
    ),
    Fault(
        "gang stop x boundaries without parking",
        "Raise the boundary of a gang that could not stop by odd distances, or one that can stop at even ones"
        " only never would",
        RankReports,
        "_overshot",
        "2 ** (min(job.asked.overshoots, _MOST_DOUBLINGS) + 1) - 1",
        "2 ** (min(job.asked.overshoots, _MOST_DOUBLINGS) + 1)",
        seed=49,
    ),
    Fault(
        "gang stop x Bye",
        "Keep a stopping gang on its devices while a rank that has said Bye still exists",
        Gang,
        "all_parked",
        "if not ranks or self.present(RankPhase.LEAVING):",
        "if not ranks:",
        seed=487,
    ),
    Fault(
        "gang x another scheduler",
        "Let a rank that ends before it has greeted the next scheduler not fail its gang: nobody could hear"
        " its Bye",
        RankProcesses,
        "gone",
        "not left_by_itself and not event.unseen",
        "not left_by_itself",
        seed=54,
    ),
    Fault(
        "gang x rank that never comes",
        "Fail a gang by name of which a rank never comes, instead of waiting for ever",
        timeouts,
        "_gathers",
        "return waits and job.processes.first_hello_s is not None and not job.ready",
        "return False",
        seed=24,
    ),
    Fault(
        "relaunch x another scheduler",
        "Give a job that is being started anew its time to save when the scheduler comes back",
        job_processes,
        "_grace_s",
        "0.0 if job.command.no_grace else job.spec.grace_s",
        "job.spec.grace_s if job.state.ended else 0.0",
        seed=82,
    ),
    Fault(
        "bound state x plan",
        "Resume a job whose state cannot move where it was, whatever a policy plans",
        Moves,
        "send_home",
        "self.carry_out(job, home, now)",
        "return",
        seed=17,
    ),
    Fault(
        "restart x silent node",
        "Spend no restart on a node that does not answer",
        restarts,
        "_is_absence",
        "away = job.processes.cut_off or job.processes.unheard",
        "away = False",
        seed=27,
    ),
    Fault(
        "lease x processes that are gone",
        "Give no device to a job whose processes are gone",
        steps,
        "_enter",
        "if not job.training() or not job.ready:",
        "if False:",
        seed=0,
    ),
    Fault(
        "Bye x lost connection",
        "Take what a rank says after its Bye for no error",
        reports,
        "answer_to",
        "phase = rank.phase",
        "phase = RankPhase.GONE if rank.phase is RankPhase.LEAVING else rank.phase",
        seed=46,
    ),
    Fault(
        "state that cannot be sent x free devices",
        "Let a job whose state cannot be brought to another node go on where it is, when a device there is"
        " free",
        homes.Homes,
        "returning",
        "if job.running and self._waits(job) else ()",
        "if False else ()",
        seed=0,
    ),
)


@contextmanager
def put_back(fault: Fault) -> Iterator[None]:
    """Have the core make that fault for as long as this lasts.

    Raises
    ------
    LookupError
        If the text of today is not there.
    """
    present: Callable[..., object] = getattr(fault.owner, fault.name)
    source = textwrap.dedent(inspect.getsource(present))
    if source.count(fault.now) != 1:
        raise LookupError(f"{fault.pair}: {fault.now!r} is not once in {present.__qualname__}")
    changed = source.replace(fault.now, fault.before)
    names: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{changed}", f"<{fault.pair}>", "exec")
    exec(code, present.__globals__, names)  # noqa: S102 (text of this project)
    setattr(fault.owner, fault.name, names[fault.name])
    try:
        yield
    finally:
        setattr(fault.owner, fault.name, present)
