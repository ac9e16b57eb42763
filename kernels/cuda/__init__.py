"""A GPU as a device: copy engines, gather and digest kernels, page-locking, the caching allocator's memory.

Public face: ``device.CudaDevice``.
"""
