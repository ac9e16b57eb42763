"""What worlds are about: of everything, or of some features that meet more often there."""

from __future__ import annotations

from typing import NamedTuple

from .policies import NAMES

_HERE, _TWO, _THREE = ("",), ("", "n1"), ("", "n1", "n2")
_WISHES = (*("hold", "release", "move") * 6, *("weigh",) * 2, "cancel")


class Profile(NamedTuple):
    """What is drawn from, each as often as it is named.

    Attributes
    ----------
    kinds
        Of jobs.
    trials
        Mini-batches of trials.
    wishes_each
        How often an owner asks for something.
    restarts, outages
        How often the scheduler ends, and how often nothing is heard of a node.
    cuts, refuses
        How often a process loses its connection, and which share of suspends and resumes is refused.
    even
        Which share of jobs can park at even boundaries only.
    sends
        Whether a state can be sent to another node.
    stays
        Whether a policy leaves jobs on their nodes until a move is worth what it costs.
    slow
        Which share of messages takes up to a second.
    resume_s, exit_s
        How long a resume takes, and how long a process lives that has said Bye.
    """

    name: str
    nodes: tuple[tuple[str, ...], ...] = (_HERE, _HERE, _TWO, _TWO, _THREE)
    policies: tuple[str, ...] = NAMES
    kinds: tuple[str, ...] = ("one", "one", "gang", "gang", "joined", "relaunched", "series")
    timeouts_s: tuple[float, ...] = (0.0, 4.0, 30.0)
    trials: tuple[int, ...] = (0, 0, 0, 2)
    boundaries: tuple[int, int] = (6, 30)
    portable: tuple[float, ...] = (1.0, 1.0, 0.6, 0.0)
    wishes_each: tuple[int, ...] = (0, 1, 2, 4)
    wishes: tuple[str, ...] = _WISHES
    restarts: tuple[int, ...] = (0, 0, 1, 2)
    outages: tuple[int, ...] = (0, 0, 1, 2)
    cuts: int = 1
    refuses: float = 0.06
    even: float = 0.2
    sends: bool = True
    stays: bool = True
    slow: float = 0.03
    resume_s: float = 0.3
    exit_s: float = 0.1


_ALL = Profile("all")
PROFILES = (
    *(_ALL,) * 3,
    Profile(
        "trials",
        nodes=(_TWO, _THREE),
        policies=("rr", "las", "2das", "restless"),
        trials=(0, 0, 5, 8),
        portable=(1.0, 0.0, 0.0),
        wishes=("hold", "release", "move", "move", "move"),
        wishes_each=(4, 8, 12),
    ),
    Profile("relaunches", kinds=("relaunched", "relaunched", "one", "gang"), restarts=(1, 2, 4), even=0.0),
    Profile(
        "gangs",
        kinds=("gang",),
        timeouts_s=(0.0,),
        boundaries=(4, 80),
        even=0.5,
        restarts=(0, 1, 3),
        slow=0.12,
        exit_s=1.0,
    ),
    Profile("connections", cuts=8, refuses=0.25, restarts=(0, 2, 4), resume_s=1.0),
    # A job that is started anew while its node is lost, or is held on its way, would wait for its state for
    # ever; a policy that never rests would have jobs leave for another node before they are back.
    Profile(
        "apart",
        nodes=(_TWO, _THREE),
        policies=("rr", "las", "2das"),
        wishes=("weigh",),
        outages=(0,),
        sends=False,
        stays=False,
    ),
)
