"""The choice of devices for a job, once a policy has decided that it runs.

``placement.Placement`` is the contract; ``registry.make_placement`` finds a placement by its name. ``nodes``,
``topology``, ``affinity`` and ``search`` hold the placements.
"""
