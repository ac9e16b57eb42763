"""Three training scripts and their data, as anybody might write them: nothing here knows of gpuslice."""
