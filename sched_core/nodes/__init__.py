"""The processes of jobs on each node: started, listened to, watched and ended, here or by an agent.

Public face: ``local_node.LocalNode``, ``remote_nodes.RemoteNodes``, ``node_agent.NodeAgent``.
"""
