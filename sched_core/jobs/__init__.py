"""A job as the live scheduler runs it: its ranks, states, command, failures and waiting times.

``gang.Gang`` is the job; ``states.TRANSITIONS`` is the only table of how its state changes.
Nothing here decides anything: ``sched_core.core`` does.
"""
