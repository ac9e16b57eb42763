"""A GPU as a device: copy engines, gather and checksum kernels, page-locking, the allocator's memory.

Public face: ``device.CudaDevice``.
"""
