"""The pure scheduler core: events in, commands out; no sockets, no processes, no clock.

``core.Core`` is the public class, ``events`` defines what it takes and returns. Each other module is a part
that handles one matter. A part is given ``contract.CoreContract``, which lists what parts may ask of the
core.
"""
