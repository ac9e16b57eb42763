"""Suspend any process that uses CUDA, by NVIDIA's driver: a running one, or a command started here.

Public face: ``adopted.suspend``, ``adopted.resume``, ``command.execute``.
"""
