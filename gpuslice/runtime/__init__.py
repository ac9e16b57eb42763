"""What runs inside a training process: boundaries, suspend and resume, checkpoints, the run report.

Public face: ``job`` (``attach``, ``Job``, ``restore``), ``boundaries.boundary``, ``current.runtime``.
"""
