"""A job's threads: the one that trains, the main one, which suspends the job for it, and those that wait.

Public face: ``TrainingThread``, ``MainThread``, ``ThreadGate``.
"""
