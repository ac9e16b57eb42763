"""The version of gpuslice, for whoever reports or prints it."""

__version__ = "0.1.0"
