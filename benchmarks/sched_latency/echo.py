"""Sends every message of a ROUTER socket back to where it came from: what ZeroMQ alone costs.

echo.py ENDPOINT
"""

from __future__ import annotations

import sys

import zmq

with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
    router.bind(sys.argv[1])
    while True:
        router.send_multipart(router.recv_multipart())
