"""What is known of the command of a job: how far its present attempt has come, and why it was told to end."""

from __future__ import annotations

from enum import Enum

import msgspec

from gpuslice.errors import InvariantError


class Stage(Enum):
    """How far the command of an attempt has come. What a stage does not need is left out."""

    ABSENT = "not started"
    BRINGING = "bringing"  # its state is brought to its nodes
    MEETING = "meeting"  # the port at which its ranks meet is found
    STARTED = "started"  # its nodes were told to start it
    ENDED = "ended"


class Purpose(Enum):
    """The purposes for which all processes of a job are ended."""

    RELAUNCH = "relaunch"  # to be started for another number of devices; the script may save first
    RELOCATE = "relocate"  # to be started on other nodes; the state is saved, so the script is not asked
    ABORT = "abort"  # its command has failed on one of its nodes; what follows is decided when all have ended
    CANCEL = "cancel"
    FAIL = "fail"
    SUCCEED = "succeed"

    @property
    def final(self) -> bool:
        """True if no other processes are started in place of those that are ended."""
        return self in (Purpose.CANCEL, Purpose.FAIL, Purpose.SUCCEED)


class Command(msgspec.Struct):
    """The command of the present attempt: one process on each of its nodes.

    Attributes
    ----------
    stage
        How far it has come.
    launched_s
        When it was to be started last. The start of a queued job may have to wait.
    exit_code
        The exit code of this command, or of the last attempt's. None while it runs.
    said
        The last lines that it wrote that tell why it failed.
    unreachable
        Why its state cannot be brought now. Empty if nothing is known to be in the way.
    port
        The port of its first node at which its ranks meet; 0 if it is on one node, or not known yet.
    ended_on, first_code
        Of a command on several nodes: the nodes on which it has ended, and the exit code of its first failure
        there, after which it has to end on all nodes. 0: it has not failed.
    not_for
        The nodes on which it could not be started, in any attempt, and why.
    misses, not_begun
        How often it was started elsewhere for that; true if this attempt has shown it of another node.
    ending
        Why its processes were told to end last. None if they were not.
    no_grace
        True if they were told to end without time to save.
    anew
        True if this attempt begins anew: the job's snapshots are removed before it is started.
    """

    stage: Stage = Stage.ABSENT
    launched_s: float = 0.0
    exit_code: int | None = None
    said: str = ""
    unreachable: str = ""
    port: int = 0
    ended_on: tuple[str, ...] = ()
    first_code: int = 0
    not_for: dict[int, str] = {}
    misses: int = 0
    not_begun: bool = False
    ending: Purpose | None = None
    no_grace: bool = False
    anew: bool = False

    @property
    def launched(self) -> bool:
        """True if it was started, or is to be started as soon as all that it needs is there."""
        return self.stage is not Stage.ABSENT

    @property
    def runs(self) -> bool:
        """True if it was ``launched`` and has not ended."""
        return self.stage not in (Stage.ABSENT, Stage.ENDED)

    def prepare(self, now: float) -> None:
        """Note that the command is to be started from now on.

        Raises
        ------
        InvariantError
            If it was started before: an attempt is launched once.
        """
        if self.launched:
            raise InvariantError("an attempt is launched a second time")
        self.launched_s, self.exit_code = now, None

    def go_on(self, stage: Stage) -> None:
        """Note that the command has come as far as ``stage``."""
        self.stage, self.unreachable = stage, ""

    def wait_for_state(self, reason: str) -> None:
        """Note ``reason``, for which the state of the job cannot be brought now."""
        self.unreachable = reason

    def meet_at(self, port: int) -> None:
        """Note the port at which the ranks meet."""
        self.port = port

    def end_on(self, node: str, code: int, said: str) -> None:
        """Note that the command has ended on ``node``, one of several. The first failure is what counts."""
        self.ended_on = (*self.ended_on, node)
        if code and not self.first_code:
            self.first_code, self.said = code, said

    def avoid(self, node: int, reason: str) -> None:
        """Note ``reason``, for which the command could not be started on ``node``."""
        self.not_begun = node not in self.not_for
        self.not_for = {**self.not_for, node: reason}

    def miss(self) -> None:
        """Count that it is started elsewhere because a node could not start it."""
        self.misses += 1

    def try_again(self, node: int) -> None:
        """Forget that the command could not be started on ``node``."""
        self.not_for = {other: why for other, why in self.not_for.items() if other != node}

    def end(self, code: int, said: str) -> None:
        """Note that the command has ended with exit code ``code``, and what it ``said`` last."""
        self.go_on(Stage.ENDED)
        self.exit_code, self.said = code, said

    def end_for(self, purpose: Purpose) -> None:
        """Note that the processes are told to end for ``purpose``, which may be stricter than the one before.

        Raises
        ------
        InvariantError
            If they were told to end for good before.
        """
        if self.ending is not None and self.ending.final:
            raise InvariantError(f"told to end ({purpose.value}) after {self.ending.value}")
        self.ending = purpose
        self.no_grace = self.no_grace or purpose is Purpose.RELOCATE

    def renew(self) -> None:
        """Note that another attempt begins, whose command is not started yet."""
        self.go_on(Stage.ABSENT)
        self.said, self.port, self.ended_on, self.first_code = "", 0, (), 0
        self.not_begun, self.ending, self.no_grace, self.anew = False, None, False, False

    def begin_anew(self) -> None:
        """Note that this attempt goes on from no snapshot."""
        self.anew = True
