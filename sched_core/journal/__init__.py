"""Every event of a scheduler in SQLite, with running checksums, and the restore of a core from them.

``journal.Journal`` writes and reads the journal; ``replay.Replay`` gives its events to a core. ``audit``,
``head`` and ``repair`` check it and save its intact part.
"""
