"""The threads of a job: the one that trains, the main one, which suspends the job, and those that wait.

Public face: ``TrainingThread``, ``MainThread``, ``ThreadGate``.
"""
