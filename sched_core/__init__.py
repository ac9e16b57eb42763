"""Deciding: the pure scheduler core, policies, placement, and the shells around them. Never imports torch.

``core`` decides live, ``sim`` simulates; both ask a ``policy.Policy`` and keep a ``ledger.Ledger``.
``live`` and ``journal`` make a running scheduler of the core.
"""
