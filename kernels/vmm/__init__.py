"""The vmm route's memory shim: a preloaded allocator whose addresses stay while their memory is given back.

Public face: ``shim.preload`` before torch, ``shim.loaded`` after, and the ``shim.Vmm`` that both give.
"""
