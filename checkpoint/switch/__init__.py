"""The suspend/resume transaction, its capture plan, moves, duplex swaps, and snapshots in the background.

Public face: ``switch.Switch`` (start reading there), ``background_snapshot.BackgroundSnapshot``.
"""
