"""``gpuslice profile``: how long a job's steps take, what memory it needs, how busy its devices are."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from gpuslice import config
from gpuslice.errors import EnvironmentUnusableError, UsageError

from .declare import Option
from .options import Words

if TYPE_CHECKING:
    from gpuslice.profiler.devices import DeviceReader
    from gpuslice.profiler.recorder import Recording
    from gpuslice.profiler.sampler import DeviceUse

_SAMPLE_EVERY_S = 0.5


def command(
    words: Words = None,
    steps: Annotated[int, Option(metavar="N", help="Record so many steps, then end the script.")] = 200,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the profile as JSON.")] = None,
    html: Annotated[Path | None, Option(metavar="FILE", help="Write the profile as a page.")] = None,
    device: Annotated[
        str | None, Option(help="cpu, cpu:1 or cuda:0; by default the one that the script uses.")
    ] = None,
) -> None:
    """Measure a script's step times, memory, devices and tensor skew.

    The script ends after --steps steps; those of its warm-up do not count (docs/measure.md). Ranks beyond 0
    go to FILE.rank1.json and so on. The exit code is the script's own.
    """
    from gpuslice.launch.command import check_outputs
    from gpuslice.launch.recording import record
    from gpuslice.profiler.sampler import Sampler

    if steps < 1:
        raise UsageError(f"--steps {steps} records nothing", "give 1 or more")
    settings = config.load(device=device)
    check_outputs({"--json": json, "--html": html})
    readers = _readers(settings)
    try:
        with TemporaryDirectory(prefix="gpuslice-profile-") as directory:
            with Sampler(readers, _SAMPLE_EVERY_S) as sampler:
                found = record(words or [], settings, steps, Path(directory))
            devices = sampler.use()
    finally:
        for reader in readers:
            reader.close()
    name = " ".join(words or [])
    for recording in found.ranks:
        _tell(name, recording, devices, json, html)
    if found.status:
        raise typer.Exit(found.status)


def _readers(settings: config.Settings) -> list[DeviceReader]:
    from gpuslice.profiler.gpus import GpuReader
    from gpuslice.profiler.hosts import HostReader

    host = HostReader(settings.cpu_slots, processes=False)
    try:
        return [GpuReader(), host]
    except EnvironmentUnusableError:
        return [host]


def _tell(
    name: str, recording: Recording, devices: list[DeviceUse], json: Path | None, html: Path | None
) -> None:
    import msgspec

    from gpuslice.launch.command import rank_path
    from gpuslice.profiler.profile import make_profile, page, summary

    profile = make_profile(recording, devices)
    if not profile.steps:
        sys.stderr.write(f"gpuslice: rank {recording.rank} made no two steps; there is nothing to time\n")
    if json is not None:
        rank_path(json, recording.rank).write_bytes(msgspec.json.encode(profile) + b"\n")
    if html is not None:
        rank_path(html, recording.rank).write_text(page(name, profile, recording), encoding="utf-8")
    title = f"rank {recording.rank} of {name}" if recording.rank else name
    print(title)
    for figure, value in summary(profile):
        print(f"  {figure + ':':22}{value}")
