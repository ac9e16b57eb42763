"""Where snapshots lie: the RAM disk's directory, its stores and slots, their budget, and the spill directory.

Public face: ``ramdisk.RamDisk``, ``store.JobStore``, ``writer.SnapshotWriter``.
"""
