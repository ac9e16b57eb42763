"""What hangs on attached objects beside their ``state_dict``: found at attach, compared at each snapshot.

Public face: ``job_attributes.JobAttributes``, ``known.KnownAttributes``.
"""
