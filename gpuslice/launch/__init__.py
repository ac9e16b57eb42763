"""Start a training process: command, environment, rank, device; diagnose the machine.

Public face: ``command.execute``, ``rank_identity.RankIdentity``, ``diagnosis.diagnose``,
``recording.record``.
"""
