"""The version of gpuslice."""

__version__ = "0.1.0"
