"""Find the live storages of a process with the garbage collector, name them, and follow autograd graphs.

Public face: ``storages.sweep``, ``live_instances.live_instances`` and ``name_of``, ``heap.uncollected``.
"""
