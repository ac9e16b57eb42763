"""Objects of a script that belong to one GPU for ever: streams, and events that were recorded.

Generators can follow the script to another GPU (``agent.gpu_names``). Streams and events cannot: a stream
in use takes the process back to its GPU.
"""

from __future__ import annotations

import torch

from gpuslice.kernels.cuda import runtime_calls

from .live_instances import live_instances, name_of_variable


def held_on(device: torch.device) -> str:
    """Return a stream or recorded event of the script on ``device``, in words; empty if there is none."""
    if device.type != "cuda":
        return ""
    streams, events = live_instances(torch.cuda.Stream, torch.cuda.Event)
    torch_capture_stream = torch.cuda.graph.default_capture_stream
    user_streams = [
        stream
        for stream in streams
        if stream is not torch_capture_stream and stream.cuda_stream not in runtime_calls.own_streams
    ]
    for what, found in (("stream", user_streams), ("event", [event for event in events if event.cuda_event])):
        bound = [one for one in found if one.device == device]
        if bound:
            name = name_of_variable(bound)
            return f"the CUDA {what} {name}" if name else f"a CUDA {what}"
    return ""


def forget_capture_stream(device: torch.device) -> None:
    """Make torch create a new stream for its next capture, if its current one is on this GPU."""
    kept = torch.cuda.graph.default_capture_stream
    if kept is not None and kept.device == device:
        torch.cuda.graph.default_capture_stream = None
