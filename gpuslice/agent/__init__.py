"""The controllers that decide at a boundary whether a job is suspended: the agent, or the drill.

Public face: ``agent.Agent`` and ``drill.from_settings``, both controllers of ``runtime.boundaries``.
The agent obeys a scheduler. The drill needs none.
"""
