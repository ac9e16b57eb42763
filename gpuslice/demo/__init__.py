"""The demonstration: three training jobs share one device, and each ends as if it had run alone.

``training`` lists the jobs, ``undisturbed`` runs them alone, ``sharing`` runs them under their own scheduler.
``daemon.replay`` reads that scheduler's journal, ``recorder`` turns it into slices and switches, ``screen``
shows them live, ``report`` writes a table, a page and a trace.
"""
