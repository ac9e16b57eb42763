"""The settings of a running scheduler: what ``gpuslice up`` gave it, and what ``gpuslice set`` changed."""
