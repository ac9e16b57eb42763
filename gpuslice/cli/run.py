"""``gpuslice run``: run a training script under gpuslice, unmodified."""

from __future__ import annotations

from typing import Annotated

from gpuslice import config
from gpuslice.launch.command import execute
from gpuslice.types import Route

from .declare import Option
from .options import CheckpointEvery, Words
from .options import Route as RouteOption


def command(
    words: Words = None,
    device: Annotated[
        str | None, Option(help="cpu, cpu:1 or cuda:0; by default the one that the script uses.")
    ] = None,
    suspend_every: Annotated[
        int | None, Option(metavar="N", help="Suspend and resume at every Nth boundary.")
    ] = None,
    suspend_at: Annotated[
        str | None, Option(metavar="3,17,40", help="Suspend and resume at these boundaries.")
    ] = None,
    checkpoint_every: CheckpointEvery = None,
    no_verify: Annotated[
        bool, Option("--no-verify", help="Restore snapshots without comparing their checksums.")
    ] = False,
    memory: Annotated[
        str | None,
        Option(metavar="3G", help="Most bytes that the script may allocate on its device; needs --device."),
    ] = None,
    route: RouteOption = None,
    ramdisk_dir: Annotated[
        str | None, Option(metavar="DIR", help="Where snapshots go; /dev/shm/gpuslice-UID by default.")
    ] = None,
    ramdisk_limit: Annotated[
        str | None, Option(metavar="4G", help="Most bytes that snapshots may take.")
    ] = None,
    spill_dir: Annotated[
        str | None,
        Option(metavar="DIR", help="Where snapshots of dead and parked jobs go if the RAM disk is full."),
    ] = None,
    spill_limit: Annotated[
        str | None, Option(metavar="50G", help="Most bytes of snapshots in --spill-dir.")
    ] = None,
    report: Annotated[str | None, Option(metavar="FILE.json", help="Write a JSON report.")] = None,
    job: Annotated[
        str | None,
        Option(
            metavar="NAME", help="Keep snapshots of attached state under this name; 'k-{fold}' takes --fold."
        ),
    ] = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Start from the beginning: remove the job's earlier snapshots.")
    ] = False,
    continue_anyway: Annotated[
        bool,
        Option(
            "--continue-anyway", help="Go on from the job's snapshot, whatever script or arguments made it."
        ),
    ] = False,
) -> int:
    """Run a script, a module or a command, unmodified, under gpuslice.

    Boundaries are where a DataLoader is about to fetch a batch (docs/run.md). gpuslice's own lines go to
    stderr. The exit code is the script's own, or 2 for a wrong command line, 3 for an unusable environment,
    4 for a corrupt or refused snapshot, 5 for a full RAM disk. SIGTSTP (Ctrl-Z) takes the job off its device,
    SIGCONT brings it back. With --route driver gpuslice stays as the command's parent (docs/gpus.md).
    """
    settings = config.load(
        device=device,
        suspend_every=suspend_every,
        suspend_at=suspend_at,
        checkpoint_every=checkpoint_every,
        verify=False if no_verify else None,
        memory=memory,
        route=route,
        ramdisk_dir=ramdisk_dir,
        ramdisk_limit=ramdisk_limit,
        spill_dir=spill_dir,
        spill_limit=spill_limit,
        report=report,
        job=job,
        fresh=fresh or None,
        continue_anyway=continue_anyway or None,
    )
    if settings.route == Route.DRIVER.value:
        from gpuslice.driver_route.command import execute as execute_under_driver

        return execute_under_driver(words or [], settings)
    return execute(words or [], settings)
