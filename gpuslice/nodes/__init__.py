"""Several nodes, by Ray: send a named job's snapshots to another node's RAM disk, once or regularly.

Public face: ``shipping.ship``, ``replication.Replication``, ``ray_nodes.connected``, ``ray_nodes.find``.
"""
