"""Beyond one node, on Ray: a named job's snapshots are sent to another node's RAM disk, by hand or regularly.

Public face: ``shipping.ship``, ``replication.Replication``, ``ray_nodes.connected``, ``ray_nodes.find``.
"""
