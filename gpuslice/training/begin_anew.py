"""Removes the snapshots of a job, then becomes its command: ``gpuslice requeue --fresh``."""

from __future__ import annotations

import os
import sys

import msgspec

from gpuslice import config
from gpuslice.errors import GpusliceError
from gpuslice.launch.command import begin_anew


def main() -> None:
    """Begin the job of the environment anew, with the command of the arguments."""
    try:
        begin_anew(msgspec.structs.replace(config.load(os.environ), fresh=True))
    except GpusliceError as error:
        sys.stderr.write(error.lines)
        sys.exit(error.exit_code)
    os.environ.pop(config.BEGIN_ANEW, None)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
