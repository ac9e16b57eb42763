"""Every event of a scheduler in SQLite, with running checksums, and the way back from it to the same core.

``journal.Journal`` writes and reads it; ``replay.Replay`` gives its events to a core.
``audit``, ``head`` and ``repair`` find out whether it is whole and save what is.
"""
