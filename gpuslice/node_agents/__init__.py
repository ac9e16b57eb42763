"""Agents on other nodes, by Ray or by ssh: the check of each node, the start and the end of its agent.

The daemon runs ``python -m gpuslice.node_agents.agents`` for each request.
"""
