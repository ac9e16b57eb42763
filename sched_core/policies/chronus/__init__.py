"""Chronus: deadlines by leases (Gao et al., SoCC 2021)."""
