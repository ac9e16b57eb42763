"""Who decides at a boundary that a job is suspended: the scheduler's agent, or the drill without a scheduler.

Public face: ``agent.Agent`` and ``drill.from_settings``, both controllers of ``runtime.boundaries``.
"""
