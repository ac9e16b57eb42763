"""The table of ``gpuslice nodes``: one line a node, at most 100 columns wide, and what is wrong with some."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from gpuslice.config import format_size
from gpuslice.verbs import NodeInfo

from . import tables
from .job_table import MOST_COLUMNS, runs, terminal_columns
from .tables import Row
from .text_width import cut, cut_inside, one_line, padded, width

_COLUMNS = ("NODE", "DEVICES", "STATE", "HEARD", "VERSION", "RAM DISK", "CLOCK", "JOBS")
#: Columns that become narrower where there is no room, and how narrow.
_SHRINK = {"JOBS": 6, "DEVICES": 10, "VERSION": 5, "NODE": 10}
_GAP = "  "
#: States of nodes that can be used.
_WELL = ("up", "starting")


def show(nodes: Sequence[NodeInfo]) -> None:
    """Print ``nodes``, then why some are left out, or what people should know of them."""
    columns = terminal_columns() if sys.stdout.isatty() else MOST_COLUMNS
    tables.print_lines(lines(nodes, columns), state=_COLUMNS.index("STATE"))
    for line in remarks(nodes):
        print(line)


def lines(nodes: Sequence[NodeInfo], columns: int = MOST_COLUMNS) -> list[list[str]]:
    """Return the table's lines, header first, as cells that have been cut and padded to fit ``columns``."""
    rows = [_COLUMNS, *map(_row, nodes)]
    widths = [max(width(row[number]) for row in rows) for number in range(len(_COLUMNS))]
    for name, least in _SHRINK.items():
        too_wide = sum(widths) + len(_GAP) * (len(widths) - 1) - columns
        number = _COLUMNS.index(name)
        widths[number] = max(min(least, widths[number]), widths[number] - max(0, too_wide))
    return [[_cell(cell, wide) for cell, wide in zip(row, widths, strict=True)] for row in rows]


def remarks(nodes: Sequence[NodeInfo], *, only_bad: bool = False) -> Iterator[str]:
    """Yield a sentence about each node that people should know something of; ``only_bad``: that is not up."""
    for node in nodes:
        if node.state in _WELL and (only_bad or not node.reason):
            continue
        silence = ""
        if node.heard_s is not None and node.state not in (*_WELL, "left out"):
            silence = f"nothing has been heard of it for {tables.duration(node.heard_s)}"
        said = "; ".join(filter(None, (silence, one_line(node.reason), one_line(node.remedy))))
        yield f"node {node.name} is {node.state}{': ' if said else ''}{said}"


def _cell(text: str, columns: int) -> str:
    return padded(cut(cut_inside(text, columns), columns), columns)


def _row(node: NodeInfo) -> Row:
    return (
        node.name,
        ",".join(runs(device.rpartition("/")[2] for device in node.devices)) or "-",
        node.state,
        "-" if node.heard_s is None else tables.duration(node.heard_s),
        node.version or "-",
        "-" if node.ramdisk_free_bytes is None else f"{format_size(node.ramdisk_free_bytes)} free",
        "-" if node.clock_s is None else f"{node.clock_s:+.1f} s",
        ",".join(node.jobs) or "-",
    )
