"""``gpuslice skew``: whether a model's tensors ask for few nodes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from gpuslice import config
from gpuslice.errors import UsageError

from .declare import Option
from .options import Words

if TYPE_CHECKING:
    from gpuslice.profiler.skew import Skew


def command(
    words: Words = None,
    model: Annotated[
        str | None,
        Option(metavar="PACKAGE.MODULE:FACTORY", help="Judge this model, which is made without memory."),
    ] = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the figures as JSON.")] = None,
) -> None:
    """Measure the tensor skew of a script's model (docs/measure.md).

    A script runs until its optimizers have made three steps. --json FILE may also stand after the script's
    arguments.
    """
    import msgspec

    from gpuslice.launch.command import check_outputs

    words, json = _last_json(words or [], json)
    if bool(words) == bool(model):
        raise UsageError("neither a script nor --model is given", "give one of the two")
    check_outputs({"--json": json})
    skew = _of_script(words) if words else _of_factory(model or "")
    if json is not None:
        json.write_bytes(msgspec.json.encode(skew) + b"\n")
    _show(skew)


def _last_json(words: list[str], json: Path | None) -> tuple[list[str], Path | None]:
    """Return the script's words, and the file of --json, which may also be the last two words."""
    if json is None and words[-2:-1] == ["--json"]:
        return words[:-2], Path(words[-1])
    return words, json


def _of_factory(model: str) -> Skew:
    from gpuslice.runtime.trainable import skew_of_factory

    return skew_of_factory(model)


def _of_script(words: list[str]) -> Skew:
    from gpuslice.launch.recording import record

    with TemporaryDirectory(prefix="gpuslice-skew-") as directory:
        found = record(words, config.load(), 3, Path(directory))
    skew = found.ranks[0].skew
    if skew is None:
        hint = "torch.optim's optimizers are looked at"
        if found.status:
            hint = f"it ended with exit code {found.status}; see what it wrote"
        raise UsageError("the script's optimizers made no step", hint)
    return skew


def _show(skew: Skew) -> None:
    from gpuslice.config import format_size
    from gpuslice.profiler.profile import verdict
    from gpuslice.profiler.skew import published_models

    print(f"{skew.tensors} trainable tensors, {format_size(skew.bytes)}")
    print(f"largest: {format_size(skew.largest_bytes)}")
    print(f"skew: {verdict(skew)}")
    known = sorted((found.skew, name) for name, found in published_models().items())
    print("for comparison: " + ", ".join(f"{name} {value:.2f}" for value, name in known))
    print("sizes up to:")
    for one in skew.distribution:
        print(f"  {format_size(one.at_most_bytes):>12}  {one.tensors:5} tensors  {format_size(one.bytes)}")
