"""The limit of the memory that a job may allocate on its device.

Public face: ``memory_limit.MemoryLimit``.
"""
