"""The scheduler: the pure core that decides, policies, placement, and the shells around it. No torch.

``core`` decides live, ``sim`` simulates; both ask a ``policy.Policy`` and keep a ``ledger.Ledger``.
``live`` and ``journal`` make a running scheduler of the core.
"""
