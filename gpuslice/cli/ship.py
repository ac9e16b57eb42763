"""``gpuslice ship``: copy a job's newest snapshot to another node."""

from __future__ import annotations

from typing import Annotated

from gpuslice.errors import UsageError

from .declare import Argument, Option
from .options import Json, StateDir


def command(
    job: Annotated[str, Argument(metavar="JOB", help="The job's name: `gpuslice run --job JOB`.")],
    to: Annotated[str, Option(metavar="NODE", help="Where to: a node's name, or its id's first digits.")],
    from_node: Annotated[
        str | None,
        Option(
            "--from",
            metavar="NODE",
            help="Copy from here; by default from the node with the newest snapshot.",
        ),
    ] = None,
    ray: Annotated[
        str | None, Option(metavar="HOST:PORT", help="The cluster's head, if not the one of this machine.")
    ] = None,
    ranks: Annotated[int | None, Option(metavar="N", help="How many ranks the job has.")] = None,
    replace: Annotated[bool, Option(help="Replace a newer snapshot there, too.")] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> int:
    """Copy a job's newest snapshot to another node.

    The job can go on from it there. The nodes are those of the running scheduler if it has some by ssh, else
    those of the Ray cluster.
    """
    import json

    import msgspec

    from gpuslice import config
    from gpuslice.config import format_size
    from gpuslice.daemon.shipping_nodes import connected

    with connected(config.state_directory(state_dir), ray) as nodes:
        target = nodes.find(to)
        others = [node for node in nodes.all() if node.id != target.id]
        source = nodes.find(from_node) if from_node else nodes.furthest(job, others, ranks)
        if source is None:
            raise UsageError(
                f"no node besides {target.name} has a whole snapshot of {job}",
                "suspend or checkpoint the job first; `gpuslice ramdisk ls` shows what a node has",
            )
        shipped = nodes.ship(job, source, target, ranks=ranks, replace=replace)
    if as_json:
        print(json.dumps(msgspec.to_builtins(shipped), indent=2))
    else:
        print(
            f"{job}: the snapshot of boundary {shipped.boundary} is on {shipped.target}, too;"
            f" {format_size(shipped.sent_bytes)} of {format_size(shipped.payload_bytes)} were sent"
        )
    return 0
