"""Themis: finish-time fairness by auctions (Mahajan et al., NSDI 2020).

``policy.Themis`` is the policy; ``arbiter`` holds the auctions, in which an ``agent`` bids for each app.
``tuner`` ends jobs of an app early.
"""
