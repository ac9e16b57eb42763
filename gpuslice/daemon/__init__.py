"""The scheduler as a process of its own, with its log, metrics and journal; no torch.

Public face: ``daemon.serve``, ``background_start.start``, ``run_timeline.timeline``,
``replay.JournalReplay``.
"""
