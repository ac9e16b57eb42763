"""The pure scheduler core: events in, commands out; no sockets, no processes, no clock.

``core.Core`` is its face, ``events`` what it takes and gives. The other modules are its parts: each does one
matter and is given ``contract.CoreContract``, which says what a part may ask of the core.
"""
