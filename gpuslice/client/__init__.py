"""Users' side of the scheduler's socket, without torch; the command line uses it, too.

Public face: ``client.Client``; ``connection.find`` chooses between the local socket and TCP.
"""
