"""A job as the live scheduler runs it: its ranks, states, command, failures and waiting times.

``gang.Gang`` is the job. Its state is derived from its facts (``phase``); ``states.TRANSITIONS`` is the only
table of how it changes.
Nothing here decides anything: ``sched_core.core`` does.
"""
