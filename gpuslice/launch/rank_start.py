"""The command that starts the ranks of a script by torchrun, if the script expects a launcher."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from gpuslice.errors import UsageError
from gpuslice.launch.script_source import imported, syntax_of

#: Variables that torchrun sets for a rank.
_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
#: Functions of torch that use these variables.
_JOINING = {"init_process_group", "init_device_mesh"}
#: Names of functions by which a script may start the other ranks itself.
_STARTING = {"spawn", "start_processes", "Process", "Popen", "fork", "notebook_launcher"}
_STARTING_LIBRARIES = {"lightning", "pytorch_lightning", "ray"}
#: A library and its class that starts workers as ranks.
_TRAINER = ("ray", "TorchTrainer")


def with_ranks(words: Sequence[str], ranks: int) -> list[str]:
    """Return the words of a job with ``ranks`` ranks, with torchrun added if its script expects a launcher.

    Parameters
    ----------
    words
        As ``gpuslice submit`` has them. ``--`` and a command are not changed.
    """
    if ranks < 2 or not words or words[0] == "--":
        return list(words)
    where = find_rank_use(words)
    if not where:
        return list(words)
    sys.stderr.write(
        f"gpuslice: {where} takes its rank from its launcher, so {ranks} ranks are started as torchrun does; "
        f"to start it once, submit -- python {' '.join(words[: 2 if words[0] == '-m' else 1])}\n"
    )
    return as_ranks(words, ranks)


def as_ranks(words: Sequence[str], ranks: int) -> list[str]:
    """Return the words of torchrun that start a script as ``ranks`` ranks. Commands stay as they are."""
    if words[0] == "--":
        return list(words)
    script = ["--module", *words[1:]] if words[0] == "-m" else list(words)
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *script]


def is_told_ranks(words: Sequence[str], most: int) -> bool:
    """Return True if a command is torchrun without a number of ranks, so that a variable can set it.

    Raises
    ------
    UsageError
        If it is torchrun on several nodes, or with a number of ranks other than ``most``.
    """
    command = list(words[1:] if words and words[0] == "--" else words)
    if not _is_torchrun(command):
        return False
    if _value(command, "nnodes") not in (None, "1", "1:1"):
        raise UsageError("torchrun is to start ranks on several nodes", "leave out --nnodes")
    ranks = _value(command, "nproc-per-node")
    if ranks not in (None, str(most)):
        raise UsageError(
            f"torchrun is to start {ranks} ranks, and the job may have up to {most} devices",
            "leave out --nproc-per-node: the scheduler says how many",
        )
    return ranks is None


def _is_torchrun(command: Sequence[str]) -> bool:
    if command and Path(command[0]).name == "torchrun":
        return True
    return "torch.distributed.run" in command[:3] and "-m" in command[:2]


def _value(command: Sequence[str], option: str) -> str | None:
    """Return the value of ``--option`` in ``command``, spelled with ``-`` or ``_``; None if not given."""
    for word, after in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name[2:].replace("_", "-") == option:
            return value if equals else after
    return None


def find_rank_use(words: Sequence[str]) -> str:
    """Return where a command's scripts expect a launcher: ``train.py:12``; "" if they expect none."""
    found = trainer = ""
    libraries, starts = set[str](), False
    for path, node in syntax_of(words):
        libraries |= _libraries(node)
        starts = starts or _starts_processes(node)
        if not found and _expects_rank(node):
            found = f"{path.name}:{node.lineno}"  # type: ignore[attr-defined]
        if not trainer and _is_named(node, _TRAINER[1]):
            trainer = f"{path.name}:{node.lineno}"  # type: ignore[attr-defined]
    if trainer and _TRAINER[0] in libraries:
        return trainer
    return "" if starts or libraries & _STARTING_LIBRARIES else found


def _expects_rank(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in _JOINING
        case ast.Constant(value=str(value)):
            return value in _VARIABLES
        case _:
            return False


def _is_named(node: ast.AST, wanted: str) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name == wanted
        case _:
            return False


def _libraries(node: ast.AST) -> set[str]:
    """Return the top-level packages that a node imports from."""
    return {name.partition(".")[0] for name in imported(node)}


def _starts_processes(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
            return name in _STARTING
        case _:
            return False
