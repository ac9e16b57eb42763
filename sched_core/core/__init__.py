"""The pure scheduler core: events in, commands out; no sockets, no processes, no clock.

``core.Core`` is the public class, ``events`` defines what it takes and returns. ``state.State`` has the facts
that all parts share. The life cycle of jobs writes them (``rank_reports``, ``rank_processes``, ``job_steps``,
``restarts``, ``launches``, ``timeouts``). ``allocation`` decides which job is to have which devices, and
``reconciliation`` takes the steps towards that. Imports between the parts point one way.
"""
