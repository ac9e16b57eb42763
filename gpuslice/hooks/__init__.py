"""Hooks into an unmodified script, which turn its batches, steps and calls into boundaries.

Public face: ``installation.install``, called after ``import torch``, and ``candidates.prepare``.
"""
