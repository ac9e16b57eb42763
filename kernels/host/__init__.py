"""The host as a device: copies by threads of this process, with checksums taken or compared on the way.

Public face: ``device.CpuDevice``; ``copies.run`` and ``process_memory`` for other code that works on host
memory.
"""
