"""``gpuslice up``: start the scheduler."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuslice import config
from gpuslice.daemon import background_start
from gpuslice.errors import UsageError
from gpuslice.files import private_directory
from gpuslice.sched_core.job import FOREIGN_GRACE_S, GRACE_S, WAIT_FOR_NODE_S, JobDefaults
from gpuslice.sched_core.switch_cost_model import SWITCH_SHARE

from .options import Json, StateDir

#: More slots than that no policy needs to fill.
MOST_PRESTARTED = 100_000


def command(
    context: typer.Context,
    devices: Annotated[
        str,
        typer.Option(metavar="cuda:0,cuda:1", help="Devices to share; cpu:2 means two slots of the host."),
    ] = "cpu:1",
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="The policy that decides who runs when.")
    ] = "rr",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="K=V", help="Option of the policy.")
    ] = None,
    quantum: Annotated[
        str | None, typer.Option(metavar="2s", help="Length of a slice [2s; of a chronus lease 60s].")
    ] = None,
    ramdisk_limit: Annotated[
        str, typer.Option(metavar="8G", help="Most bytes that snapshots may take.")
    ] = "",
    spill_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where snapshots of dead and parked jobs go if the RAM disk is full."
        ),
    ] = None,
    spill_limit: Annotated[
        str, typer.Option(metavar="50G", help="Most bytes of snapshots in --spill-dir.")
    ] = "",
    bind: Annotated[
        str | None, typer.Option(metavar="tcp://HOST:PORT", help="Let users connect by TCP, too.")
    ] = None,
    curve_keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keys for --bind, see `gpuslice keys`.")
    ] = None,
    switch_share: Annotated[
        float, typer.Option(metavar="0.03", help="Part of the time that switching may take; 0: any.")
    ] = SWITCH_SHARE,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="P", min=0, max=65535, help="Serve metrics for Prometheus at this local port."),
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT=K", help="Devices that jobs of a tenant may ask for together."),
    ] = None,
    tenant_ramdisk: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT=8G", help="Most bytes that snapshots of a tenant's jobs may take."),
    ] = None,
    pack: Annotated[
        bool,
        typer.Option("--pack", help="Let pairs of jobs share a device where that is measured to pay."),
    ] = False,
    profiles: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured pairs of `gpuslice colocate --json`, for --pack."),
    ] = None,
    defragment: Annotated[
        bool,
        typer.Option(
            "--defragment", help="Move scattered gangs together when a job leaves, where that pays."
        ),
    ] = False,
    placement: Annotated[
        str,
        typer.Option(metavar="NAME", help="Which devices a job gets: consolidated, spread, skew, ..."),
    ] = "",
    sockets: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Number of sockets that the devices lie on, in equal parts and in order."
        ),
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(metavar="auto|HOST:PORT", help="Share these devices on all nodes of this Ray cluster."),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=USER@HOST[:PYTHON]", help="Share these devices on this machine, too, by ssh."
        ),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Leave a node of the cluster out.")
    ] = None,
    agent_port: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Where other nodes reach the scheduler; else any port.")
    ] = "",
    node_timeout: Annotated[
        str, typer.Option(metavar="60s", help="A node that is silent for so long is lost.")
    ] = "60s",
    wait_for_node: Annotated[
        str,
        typer.Option(
            metavar="10m", help="How long jobs wait for a lost node, 0s: not at all; submit --wait-for-node."
        ),
    ] = f"{WAIT_FOR_NODE_S / 60:g}m",
    replicate_every: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Copy every Nth snapshot of a job to another node; 0: none."),
    ] = 0,
    grace: Annotated[
        str,
        typer.Option(metavar="30s", help="How long jobs may take to end when asked to; submit --grace."),
    ] = f"{GRACE_S:g}s",
    foreign: Annotated[
        list[str] | None,
        typer.Option(
            metavar="wait|share|ignore",
            help="What jobs do about GPUs that others use: park and wait, go on, or not look; cuda:2=share.",
        ),
    ] = None,
    foreign_grace: Annotated[
        str, typer.Option(metavar="10s", help="How long a GPU must be used by others until jobs park.")
    ] = f"{FOREIGN_GRACE_S:g}s",
    foreign_ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROGRAM", help="A program that may be on a GPU, besides displays and monitors."
        ),
    ] = None,
    prefer: Annotated[
        str, typer.Option(metavar="cuda:3,cuda:2", help="Devices that jobs get first, if they are free.")
    ] = "",
    prestart: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=MOST_PRESTARTED,
            help="Start at most so many jobs before their turn; by default about one a device.",
        ),
    ] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on with the part of a damaged journal that can be read.")
    ] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground; Ctrl-C ends it.")
    ] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start the scheduler in the background (docs/share.md).

    Returns when it can be used, and prints where it runs.

    Exit code 2 for a wrong option, 3 if it cannot run here or one runs already, 4 for a damaged journal.
    """
    directory = config.state_directory(state_dir)
    if not foreground and ready_fd is None:
        words = [*sys.argv[sys.argv.index("up") + 1 :], "--state-dir", str(directory)]
        pid = background_start.start(directory, words)
        said = json.dumps({"pid": pid, "directory": str(directory)})
        print(said if as_json else f"scheduler {pid} runs in {directory}")
        return
    # Of the process that stays; the one that starts it need not load them.
    from gpuslice.checkpoint.files import store_directory
    from gpuslice.daemon import daemon, device_lists, other_nodes, scheduler_setup
    from gpuslice.daemon.interference_profiles import read_profiles
    from gpuslice.nodes import foreign_use
    from gpuslice.sched_core.live.client_socket import ClientSocket
    from gpuslice.types import checked

    with background_start.StartupPipe(ready_fd) as starter:
        for size in filter(None, (ramdisk_limit, spill_limit)):
            config.parse_size(size)
        if spill_limit and spill_dir is None:
            raise UsageError(
                "--spill-limit is given without --spill-dir", "name the directory: --spill-dir DIR"
            )
        if spill_dir is not None:
            private_directory(spill_dir, option="--spill-dir", parents=True)
        tcp = scheduler_setup.tcp_listener(bind, curve_keys)
        scheduler_setup.check_switch_share(f"--switch-share {switch_share}", switch_share)
        wait_for_node_s = config.parse_duration(wait_for_node, may_be_zero=True)
        defaults = JobDefaults(config.parse_duration(grace), wait_for_node_s)
        quantum_s = None if quantum is None else config.parse_duration(quantum)
        options = scheduler_setup.options(
            policy, settings or [], quantum_s, pack=pack, defragment=defragment, placement=placement
        )
        warnings: list[str] = []
        others = None
        if ray is None and not node:
            other_nodes.refuse_without_nodes(replicate_every, without or [], agent_port)
            local = names = device_lists.parse_devices(devices)
        else:
            others = other_nodes.OtherNodes(
                directory,
                device_lists.parse_devices_of_nodes(devices),
                ray=ray or "",
                hosts=other_nodes.hosts(node or [], ray),
                without=without or [],
                listen=other_nodes.listener(agent_port),
                lost_after_s=config.parse_duration(node_timeout),
                replicate_every=replicate_every,
                say=starter.tell,
            )
            local, names = others.local, others.devices
        if any(name.kind != "null" for name in local):
            store_directory(ramdisk := config.load().ramdisk_directory)
            warnings.append(scheduler_setup.small_ramdisk_warning(ramdisk))
        warnings.append(scheduler_setup.oversubscription_warning(local))
        names = foreign_use.preferred(names, prefer)
        grace_s = config.parse_duration(foreign_grace, may_be_zero=True)
        use = foreign_use.parse_foreign(foreign or [], grace_s, foreign_ignore or [], names)
        device_memory_bytes = scheduler_setup.device_memory(local)
        setup = checked(
            scheduler_setup.Setup(
                names,
                policy,
                options,
                ramdisk_limit,
                switch_share,
                scheduler_setup.quotas(quota or []),
                device_memory_bytes,
                scheduler_setup.tenant_ramdisk(tenant_ramdisk or []),
                "" if spill_dir is None else str(spill_dir.absolute()),
                spill_limit,
                profiles=() if profiles is None else read_profiles(profiles),
                sockets=sockets,
                starts_ahead=others is not None,
            )
        )

        def ready(client_socket: ClientSocket) -> None:
            if ready_fd is None:
                print(f"scheduling {', '.join(map(str, setup.devices))} in {directory}", flush=True)
                if tcp is not None:
                    print(f"listening at {client_socket.endpoints[-1]}", flush=True)
            for warning in filter(None, warnings):
                starter.tell(warning)
            starter.ready()

        daemon.serve(
            directory,
            setup,
            ready,
            tcp=tcp,
            metrics_port=metrics_port,
            prestart=prestart,
            defaults=defaults,
            accept_loss=accept_loss,
            others=others,
            foreign=use,
            stated=_stated(context, policy),
            warn=starter.tell,
        )


def _stated(context: typer.Context, policy: str) -> list[str]:
    """Return the options that were given, each KEY=VALUE, of those that ``gpuslice set`` can change."""
    names = {"settings": "", "quota": "quota"} | {
        name: name.replace("_", "-")
        for name in (
            *("devices", "policy", "quantum", "pack", "defragment", "placement", "switch_share"),
            *("grace", "wait_for_node", "prestart"),
        )
    }
    found = []
    for name, key in names.items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if name == "settings":
            found += [f"{policy}.{setting}" for setting in value]
        elif name == "quota":
            found += [f"quota={setting}" for setting in value]
        else:
            found.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return found
