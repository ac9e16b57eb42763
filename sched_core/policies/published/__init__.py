"""Policies as the simulator published with Tiresias computes them, mistakes included (docs/simulate.md).

``orders`` and ``queues`` hold the orders and the multi-level queues, ``gandiva`` the packing policy.
They exist to be compared with; the policies proper are in the other files.
"""
