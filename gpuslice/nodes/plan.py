"""Messages, as JSON, between the scheduler, its processes that reach other nodes, and the agents there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuslice.errors import GpusliceError
from gpuslice.types import Label, PathText, Seconds, Word

#: The directory of keys, in that of the scheduler.
KEYS = "node-keys"
#: What a line on an engine's stderr begins with that is to be told to people at once.
SAID = "gpuslice-says "


class Found(msgspec.Struct, frozen=True):
    """A node that the scheduler can use.

    Attributes
    ----------
    name
        The node's name in device names; empty for the scheduler's own node.
    id, ray_name
        Id and name in Ray. Without Ray, ``id`` is what ssh is told.
    address
        Address at which other nodes reach the node.
    devices
        Names of the devices that are shared there; None for those of ``up --devices``.
    directory
        Directory of the agent there; empty for ``nodes/NAME`` in the scheduler's.
    python
        Path of the node's Python; empty for that of the scheduler.
    """

    name: Label
    id: Word
    ray_name: Word
    address: Word
    devices: tuple[Word, ...] | None = None
    directory: PathText = ""
    python: PathText = ""


class Remark(msgspec.Struct, frozen=True):
    """What people should know about a node.

    Attributes
    ----------
    node
        Its name.
    reason, remedy
        What is wrong, and what to do about it.
    left_out
        True if the node is not used because of it.
    """

    node: Label
    reason: Word
    remedy: Word = ""
    left_out: bool = True

    @classmethod
    def of(cls, node: str, error: GpusliceError) -> Remark:
        """Return that ``node`` is left out because of ``error``."""
        return cls(node, error.message, error.remedy)

    def __str__(self) -> str:
        what = "is left out" if self.left_out else "is used, but"
        return f"node {self.node or 'here'} {what}: {self.reason}" + (
            f"; {self.remedy}" if self.remedy else ""
        )


class Answer(msgspec.Struct, frozen=True):
    """The answer of an engine.

    Attributes
    ----------
    nodes
        The nodes that can be used, the scheduler's own first.
    remarks
        What people should know about these and others.
    """

    nodes: tuple[Found, ...] = ()
    remarks: tuple[Remark, ...] = ()


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of an agent.

    Attributes
    ----------
    name
        Name of the agent's node.
    endpoint, scheduler
        The scheduler's address and public key.
    public, secret
        The agent's own keys.
    gpus
        True if its devices are GPUs.
    logs
        What the scheduler's logs are known by: those of a node are set aside with them.
    devices, working_directory
        What is shared there, and where jobs are likely to be submitted: the agent looks if they are there.
    """

    name: Label
    endpoint: Word
    scheduler: Word
    public: Word
    secret: Word
    gpus: bool = False
    logs: Word = ""
    devices: tuple[Word, ...] = ()
    working_directory: PathText = ""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that is reached by ssh: ``up --node NAME=ADDRESS[:PYTHON]``.

    Attributes
    ----------
    name
        The name of the node in device names.
    address
        Host for ssh: a name or address, ``user@host``, or a name in the user's ``~/.ssh/config``.
    python
        Path of the Python there; empty for that of the scheduler if it exists there, else ``python3``.
    """

    name: Label
    address: Word
    python: PathText = ""


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request of the scheduler to an engine.

    Attributes
    ----------
    address
        Address of the Ray cluster; empty for the one that runs on this machine.
    hosts
        The nodes that are reached by ssh. If there are some, ssh is the engine, else Ray.
    without
        Nodes that are left out on purpose.
    devices
        Devices to share on each node, or with the node's name before it on that one, as for ``up``.
    working_directory
        Directory from which jobs are likely to be submitted.
    nodes
        The scheduler's, in talk of a snapshot those that are not lost.
    directory
        Directory of the scheduler.
    agents
        What each agent is told, by node.
    sources, targets
        From where and to where the snapshot of each rank is to be brought.
    ramdisk_dir
        The RAM disk of the scheduler's own node, if not the usual one.
    endpoint
        Where the scheduler listens for agents.
    patience_s
        How long a node may take to be in the Ray cluster when an agent is to begin there.
    """

    address: Word = ""
    hosts: tuple[Host, ...] = ()
    without: tuple[Label, ...] = ()
    devices: tuple[Word, ...] = ()
    working_directory: PathText = ""
    nodes: tuple[Found, ...] = ()
    directory: PathText = ""
    agents: dict[Label, Config] = {}
    sources: tuple[Label, ...] = ()
    targets: tuple[Label, ...] = ()
    ramdisk_dir: PathText = ""
    endpoint: Word = ""
    patience_s: Seconds = 0.0


def of_node(name: str, devices: Sequence[str]) -> tuple[str, ...]:
    """Return which of ``devices`` are meant for node ``name``: those of every node, and its own."""
    parts = [one.rpartition("/") for one in devices]
    return tuple(dict.fromkeys(device for node, _, device in parts if node in ("", name)))
