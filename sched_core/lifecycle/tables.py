"""What each report of a rank is, by the rank's phase: news, known, stale or impossible.

Rules
-----
- A report is looked up before anything is written. What is impossible is refused and changes nothing.
- Of the rules for a report and a phase the first whose condition holds counts. If none does, the report is
  impossible.
- Conditions on the job or on its other ranks are the joint rules of a gang.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from gpuslice.sched_core.jobs.rank import RankPhase


class Report(Enum):
    """What a rank says, or what is said of its processes."""

    PROGRESS = "Progress"
    PROFILED = "Profiled"
    RESUMED = "Resumed"
    SUSPENDED = "Suspended"
    OVERSHOT = "Overshot"
    SUSPEND_REFUSED = "Refused, running"
    RESUME_REFUSED = "Refused, parked"
    WITHDRAWN = "Withdrawn"
    BYE = "Bye"
    GONE = "end"
    OTHER_GONE = "end of another process"
    HELLO_PARKED = "Hello, parked"
    HELLO_RUNNING = "Hello, running"
    HELLO_ANEW = "Hello of its process, which executes another program"
    HELLO_BESIDE = "Hello of a process that trains beside it"
    HELLO_CHILD = "Hello of a child that is to take its place"
    HELLO_NEXT = "Hello of another process"
    HELLO_TRAINED = "Hello of another process that has trained"


class Answer(Enum):
    """What a report is to the core."""

    NEWS = "news"
    KNOWN = "known"  # it was said before, or nothing follows from it any more
    STALE = "stale"  # of an earlier epoch or attempt
    IMPOSSIBLE = "impossible"


class If(Enum):
    """The conditions of rules, on the report, the rank, the job and its other ranks."""

    ALWAYS = "always"
    EARLIER = "it names an earlier epoch"
    LATER = "it names an epoch that has not begun"
    OTHER_LEASE = "it names another epoch than the present one"
    SAID_BEFORE = "its boundary is not beyond the rank's newest"
    TOLD_TO_COME = "the job is starting or resuming, or a rank that parked too early is told to come back"
    MAY_PARK = "the job is told to stop, or a rank may still obey a stop that was called off"
    IDLES = "the job has one process, which has not begun to train"
    LONE = "the job has one rank"
    ENDED = "the job has ended"


Rule = tuple[If, Answer]
Rules = tuple[Rule, ...]
_P = RankPhase
_NEWS: Rules = ((If.ALWAYS, Answer.NEWS),)
_KNOWN: Rules = ((If.ALWAYS, Answer.KNOWN),)
_NEVER: Rules = ((If.ALWAYS, Answer.IMPOSSIBLE),)
#: Phases in which the rank has a process.
THERE = (_P.PARKED, _P.COMING, _P.ON, _P.LEAVING)
#: The rules before all others for what a rank says under a lease.
_FENCES: Rules = ((If.LATER, Answer.IMPOSSIBLE), (If.EARLIER, Answer.STALE))
_PRESENT_LEASE: Rules = ((If.OTHER_LEASE, Answer.IMPOSSIBLE), *_NEWS)
_NO_LATER_LEASE: Rules = ((If.LATER, Answer.IMPOSSIBLE), *_NEWS)


def _said(rules: Mapping[RankPhase, Rules]) -> dict[RankPhase, Rules]:
    """Return the rules of a message that a rank sends under a lease. Only a rank with a process says one."""
    return {phase: (*_FENCES, *rules.get(phase, ())) for phase in THERE}


_ANY: Mapping[RankPhase, Rules] = dict.fromkeys(THERE, _NEWS)
_OF_ANOTHER = dict.fromkeys(_P, _NEWS)

REPORTS: Mapping[Report, Mapping[RankPhase, Rules]] = {
    Report.PROGRESS: _said(_ANY),
    Report.PROFILED: _said(_ANY),
    Report.RESUMED: _said(
        {
            _P.COMING: _NEWS,
            # A Resume that was sent again after a Hello is obeyed even if the first was refused meanwhile.
            _P.PARKED: ((If.TOLD_TO_COME, Answer.NEWS),),
        }
    ),
    Report.SUSPENDED: _said(
        {
            _P.ON: ((If.MAY_PARK, Answer.NEWS),),
            _P.PARKED: ((If.SAID_BEFORE, Answer.KNOWN),),  # said again after a Hello
            _P.COMING: ((If.SAID_BEFORE, Answer.KNOWN),),
        }
    ),
    Report.OVERSHOT: _said(
        {
            _P.ON: _NEWS,
            _P.LEAVING: _KNOWN,  # the order met it when its script had ended
        }
    ),
    Report.SUSPEND_REFUSED: _said({_P.ON: _NEWS}),
    Report.RESUME_REFUSED: _said(
        {
            _P.COMING: _NEWS,
            _P.PARKED: _KNOWN,  # of the same Resume, which was said again after a Hello
        }
    ),
    Report.WITHDRAWN: _said({_P.ON: ((If.IDLES, Answer.NEWS),)}),
    Report.BYE: _said({**_ANY, _P.LEAVING: _KNOWN}),
    Report.GONE: {**_ANY, _P.ABSENT: ((If.ENDED, Answer.KNOWN),)},
    Report.OTHER_GONE: _OF_ANOTHER,
    Report.HELLO_PARKED: {
        _P.PARKED: _NO_LATER_LEASE,  # its next lease was lost
        _P.COMING: _NO_LATER_LEASE,
        _P.ON: _PRESENT_LEASE,
        _P.LEAVING: _NEWS,  # its Bye is known, but it may have to be dismissed again
    },
    Report.HELLO_RUNNING: {
        _P.PARKED: ((If.OTHER_LEASE, Answer.IMPOSSIBLE), (If.TOLD_TO_COME, Answer.NEWS)),
        _P.COMING: _PRESENT_LEASE,  # its Resumed was lost
        _P.ON: _PRESENT_LEASE,
        _P.LEAVING: _NEWS,
    },
    Report.HELLO_ANEW: {_P.ON: _NEWS, _P.LEAVING: _NEWS},
    Report.HELLO_BESIDE: _OF_ANOTHER,
    Report.HELLO_CHILD: dict.fromkeys((_P.PARKED, _P.COMING, _P.ON), ((If.LONE, Answer.NEWS),)),
    Report.HELLO_NEXT: _OF_ANOTHER,
    Report.HELLO_TRAINED: {_P.ABSENT: _NEWS},
}


#: The rules of every report in every phase. The last rule of each always holds.
RULES: Mapping[tuple[Report, RankPhase], Rules] = {
    (report, phase): (*REPORTS[report].get(phase, ()), *_NEVER) for report in Report for phase in RankPhase
}
