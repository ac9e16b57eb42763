"""Measurements: step time, memory, tensor skew, interference, timelines."""
