"""Messages, as JSON, between the scheduler, its processes that use Ray, and the agents."""

from __future__ import annotations

import msgspec

from gpuslice.types import Label, PathText, Word


class Found(msgspec.Struct, frozen=True):
    """A node of the Ray cluster, as the scheduler has found it.

    Attributes
    ----------
    name
        The node's name in device names; empty for the scheduler's own node.
    id, ray_name
        Ray's.
    address
        Address at which other nodes reach the node.
    """

    name: Label
    id: Word
    ray_name: Word
    address: Word


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
    """

    name: Label
    endpoint: Word
    scheduler: Word
    public: Word
    secret: Word
    gpus: bool = False
    logs: Word = ""


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request of the scheduler to Ray, which a process of its own carries out.

    Attributes
    ----------
    address
        Address of the cluster; empty for the one that runs on this machine.
    nodes
        The scheduler's, in talk of a snapshot those that are not lost.
    directory
        Directory of the scheduler. An agent's is ``nodes/NAME`` in it.
    agents
        What each agent is told, by node.
    cpus, gpus
        Resources that Ray must reserve on each node; ``cpus`` below 0 stands for all.
    sources, targets
        From where and to where the snapshot of each rank is to be brought.
    ramdisk_dir
        The RAM disk of the scheduler's own node, if not the usual one.
    """

    address: Word = ""
    nodes: tuple[Found, ...] = ()
    directory: PathText = ""
    agents: dict[Label, Config] = {}
    cpus: int = 0
    gpus: int = 0
    sources: tuple[Label, ...] = ()
    targets: tuple[Label, ...] = ()
    ramdisk_dir: PathText = ""
