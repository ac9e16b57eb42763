"""Which job is to have which devices, and when the command of a job is started.

``allocation.Allocation`` puts the parts together. ``eligibility`` says which jobs the policy may choose,
``planning`` asks the policy, and ``planned_devices`` keeps what its plan gives to whom. ``moves``, ``homes``,
``bound_jobs`` and ``trials`` change that for single jobs.
"""
