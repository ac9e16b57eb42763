"""The start of a training process (command, environment, rank, device), and the machine's diagnosis.

Public face: ``command.execute``, ``rank_identity.RankIdentity``, ``diagnosis.diagnose``,
``recording.record``.
"""
