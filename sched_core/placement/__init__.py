"""Where a job goes, once a policy has decided that it runs.

``placement.Placement`` is the contract; ``registry.make_placement`` finds one by its name.
``nodes``, ``topology``, ``affinity`` and ``search`` hold the placements.
"""
