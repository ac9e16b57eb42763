"""Traces: what was submitted when, how many devices it asked for and how long it runs.

``trace.Trace`` is one; ``formats.read_trace`` reads files and ``synth.synthesize`` makes up new ones.
``describe.stats`` counts what is in one.
"""
