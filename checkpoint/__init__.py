"""Snapshots: discovery, format, RAM disk, capture, restore."""
