"""The buckets in which DDP adds up gradients: a restarted rank uses those of the process before it.

DDP lays gradients out in buckets: at first in the order of the parameters, after the first backward pass in
the order in which gradients became ready. The place of a gradient decides in which order the ranks' values
are added. With three ranks or more, a process that begins with the first layout would therefore round its
first step differently. A snapshot records the layout, and a restart begins with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import distributed

#: Numbers of parameters, bucket by bucket.
Buckets = Sequence[Sequence[int]]
#: The entry of DDP's log that has the layout, and its usual interval in iterations.
_LAYOUT, _USUAL_RATE = "rebuilt_per_bucket_param_indices", 100


def replicated_parts(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the submodules of type ``DistributedDataParallel``, ``module`` included, with their names."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is not None and distributed.is_available() and distributed.is_initialized():
        for name, part in module.named_modules(remove_duplicate=False):
            if isinstance(part, parallel.DistributedDataParallel):
                yield name, part


def layout(part: Any) -> list[list[int]]:
    """Return a DDP module's gradient buckets; an empty list before DDP has built them by gradient order."""
    if _LAYOUT not in part._get_ddp_logging_data():
        # DDP notes the buckets at its next logged iteration, which may be far away.
        part._set_ddp_runtime_logging_sample_rate(1)
        part.logger.set_runtime_stats_and_log()
        part._set_ddp_runtime_logging_sample_rate(_USUAL_RATE)
    noted = str(part._get_ddp_logging_data().get(_LAYOUT, ""))
    return [list(map(int, bucket.split())) for bucket in noted.split(",") if bucket.strip()]


def lay_out(part: Any, buckets: Buckets) -> None:
    """Give a DDP module these gradient buckets, as if it had built them itself.

    Nothing happens if it has other parameters, a communication hook, a static graph or mixed precision.
    """
    parameters, sparse = part._build_params_for_reducer()
    special = part.static_graph or part.mixed_precision or part._get_ddp_logging_data().get("comm_hook")
    if special or sorted(chain(*buckets)) != list(range(len(parameters))) or not all(buckets):
        return
    names = part._build_debug_param_to_name_mapping(parameters)
    with _assigned(buckets, part.bucket_bytes_cap):
        part._ddp_init_helper(parameters, sparse, names, False)


@contextmanager
def _assigned(buckets: Buckets, limit_bytes: int) -> Iterator[None]:
    """Make DDP use these buckets inside the block, instead of those that torch computes from sizes."""
    library: Any = distributed  # the stubs lack private functions
    assign = library._compute_bucket_assignment_by_size
    found = [list(bucket) for bucket in reversed(buckets)], [limit_bytes] * len(buckets)
    library._compute_bucket_assignment_by_size = lambda *_: found
    try:
        yield
    finally:
        library._compute_bucket_assignment_by_size = assign
