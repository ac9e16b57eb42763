"""Starting a training process: the command, its environment, its rank and device, the machine's diagnosis.

Public face: ``command.execute``, ``rank_identity.RankIdentity``, ``diagnosis.diagnose``,
``recording.record``.
"""
