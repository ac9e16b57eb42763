"""Gandiva: time slices, packing, migration and growing, by measuring what helps (Xiao et al., OSDI 2018).

``policy.Gandiva`` is the policy; ``servers`` keeps the slices of each server. ``packing`` tries jobs together
in simulations and keeps the pairs that gain; ``live_packing`` does so by live measurements, under any policy.
"""
