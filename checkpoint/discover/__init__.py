"""Live storages of a process: found from the garbage collector, named for people, followed into graphs.

Public face: ``storages.sweep``, ``live_instances.live_instances`` and ``name_of``, ``heap.uncollected``.
"""
