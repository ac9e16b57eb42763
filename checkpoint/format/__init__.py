"""The snapshot format GSNP/2: layout, records, checksums, the tree of values; reading and exporting a file.

Public face: ``layout.Layout``, ``reader.open_snapshot``, ``tree.encode`` and ``tree.decode``.
"""
