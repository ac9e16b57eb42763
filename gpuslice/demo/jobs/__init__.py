"""Three ordinary training scripts and their data. None of them uses gpuslice."""
