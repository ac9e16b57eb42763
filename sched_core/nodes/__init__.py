"""The processes of jobs on each node: start, listen to, watch and end them, here or by an agent.

Public face: ``local_node.LocalNode``, ``remote_nodes.RemoteNodes``, ``node_agent.NodeAgent``.
"""
