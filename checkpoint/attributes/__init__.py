"""Objects reachable from attached ones beside their ``state_dict``: recorded, compared, restored.

Public face: ``job_attributes.JobAttributes``, ``known.KnownAttributes``.
"""
