"""The demonstration: three real training jobs share one device, and end as if each had had it alone.

``training`` says what runs, ``undisturbed`` runs it alone, ``sharing`` under the scheduler; ``recorder``
watches, ``screen`` shows it live, ``report`` puts it into a table, a page and a trace.
"""
