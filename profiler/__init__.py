"""Measuring: step time, memory, tensor skew, interference, timelines."""
