"""Traces: what was submitted when, how many devices it asked for and how long it runs."""
