"""Any process that uses CUDA, off its GPUs and back by NVIDIA's driver: one that runs already, or a command.

Public face: ``adopted.suspend``, ``adopted.resume``, ``command.execute``.
"""
