"""The demonstration: three real training jobs share one device, and end as if each had had it alone.

``training`` says what runs, ``undisturbed`` runs it alone, ``sharing`` under a scheduler of its own.
``daemon.replay`` reads its journal, ``recorder`` makes slices and switches of it, ``screen`` shows them live,
``report`` puts them into a table, a page and a trace.
"""
