"""The jobs that are kept while no scheduler runs: their snapshots, their file, and the way back."""
