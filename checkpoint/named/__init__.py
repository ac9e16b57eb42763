"""The named state of an attached job: described for a snapshot, checked and loaded back in any process.

Public face: ``state.describe``, ``state.check``, ``process_rng``.
"""
