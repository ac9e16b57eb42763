"""Deciding: the pure scheduler core, policies, placement, and the shells around them. Never imports torch."""
