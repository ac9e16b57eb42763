"""``python -m gpuslice`` is the ``gpuslice`` command."""

from gpuslice.cli import main

main()
