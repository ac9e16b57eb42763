"""The suspend/resume transaction, its capture plan, moves, and snapshots in the background.

Public face: ``switch.Switch`` (start reading there), ``background_snapshot.BackgroundSnapshot``.
"""
