"""The place of snapshots: the RAM disk's directory, its stores and slots, their budget, the spill directory.

Public face: ``ramdisk.RamDisk``, ``store.JobStore``, ``writer.SnapshotWriter``.
"""
