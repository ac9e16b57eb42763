"""What a job may allocate on its device, kept where it allocates.

Public face: ``memory_limit.MemoryLimit``.
"""
