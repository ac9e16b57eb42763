"""Chronus: deadlines by leases (Gao et al., SoCC 2021).

``policy.Chronus`` is the policy. ``planner`` plans leases, by ``milp`` if a solver is there.
``allocate`` places what was planned on nodes.
"""
