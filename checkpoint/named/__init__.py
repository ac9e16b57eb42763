"""The named state of an attached job: describe it for a snapshot, check it, and load it in any process.

Public face: ``state.describe``, ``state.check``, ``process_rng``.
"""
