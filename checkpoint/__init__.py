"""Snapshots of a job's state: discovery, format, RAM disk, capture, restore."""
