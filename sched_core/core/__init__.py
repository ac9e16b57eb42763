"""The pure scheduler core: events in, commands out; no sockets, no processes, no clock.

``core.Core`` passes each event through the life cycle of jobs and the allocation of devices.
``owner_requests`` carries out what the owners of jobs want.
"""
