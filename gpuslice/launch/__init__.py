"""Starting a training process: command, environment, rank, device; the machine's diagnosis.

Public face: ``command.execute``, ``rank_identity.RankIdentity``, ``diagnosis.diagnose``,
``recording.record``.
"""
