"""What must hold of a training that has grown and shrunk, by what its ranks wrote down (``training.py``)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from . import training

#: Float32's unit roundoff.
ROUNDOFF = 2.0**-24

Lines = list[dict[str, Any]]


def logs(path: Path, ranks: int) -> list[Lines]:
    files = (path.with_name(f"{path.name}.{rank}") for rank in range(ranks))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def check_epochs(written: list[Lines], epochs: int = training.EPOCHS) -> None:
    """Every sample was seen exactly once an epoch, by one rank or another."""
    for epoch in range(epochs):
        seen = Counter(
            index
            for lines in written
            for line in lines
            if line.get("epoch") == epoch
            for index in line["seen"]
        )
        assert seen == Counter(range(training.LENGTH))


def check_equal(written: list[Lines]) -> None:
    """All ranks that train together hold the same bits, and report the same losses."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in (line for lines in written for line in lines if "step" in line):
        by_step.setdefault(line["step"], []).append(line)
    assert sorted(by_step) == list(range(len(by_step)))
    for lines in by_step.values():
        assert len(lines) == lines[0]["width"]
        assert len({(line["state"], line["loss"], line["samples"]) for line in lines}) == 1


def check_state(written: list[Lines]) -> None:
    """What a step has left is what the next one finds, bit for bit, whoever has which part of it."""
    steps = {line["step"]: line for lines in written for line in lines if "step" in line}
    for step in range(1, len(steps)):
        assert steps[step]["state"] == steps[step - 1]["after"]


def widths(lines: Lines) -> list[int]:
    return [line["width"] for line in lines if "width" in line]


def gradient_bound(lines: Lines) -> float:
    """How far the gradients that two runs compute for the same weights may be apart, in the 2-norm.

    Each entry is a sum of ``n`` products of numbers that are themselves sums of ``k`` products, in any order.
    Its rounding error is at most ``gamma(n + k + ...)`` times the sum of the absolute values, in both runs
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
    """
    inputs, targets = (part.double().abs() for part in training.data())
    largest = max(max(map(abs, line["weight"])) + abs(line["bias"]) for line in lines) + 1.0
    residuals = inputs.sum(1) * largest + largest + targets
    columns = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
    # The mean over any batch is at most the largest row.
    magnitude = 2.0 * float((columns * residuals[:, None]).amax(0).norm())
    operations = training.BATCH + training.FEATURES + 8
    return 2.0 * operations * ROUNDOFF / (1.0 - operations * ROUNDOFF) * magnitude


def check_close(resized: Lines, fixed: Lines) -> float:
    """The weights and losses of two runs differ by no more than the order of sums allows; the last bound.

    Gradient descent on a convex quadratic with a rate below 2 / curvature does not amplify errors. After
    ``k`` steps the weights are at most ``k * rate * bound`` apart, losses by the slope times that.
    """
    inputs, _ = training.data()
    columns = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
    curvature = 2.0 * float((columns**2).sum(1).max())  # of any batch's mean
    assert training.RATE * curvature < 2.0
    bound, weights_bound = gradient_bound(fixed[:-1]), 0.0
    # The slope of a batch's loss is at most 2 |residual| |x|: the bound without its roundoff.
    slope = bound / (2.0 * (training.BATCH + training.FEATURES + 8) * ROUNDOFF)
    for step, (ours, theirs) in enumerate(zip(resized[:-1], fixed[:-1], strict=True)):
        assert ours["step"] == theirs["step"] == step
        weights = (torch.tensor([*line["weight"], line["bias"]]).double() for line in (ours, theirs))
        weights_bound = (step + 1) * training.RATE * (bound + ROUNDOFF * 4)
        assert float(torch.dist(*weights)) <= weights_bound
        assert abs(ours["loss"] - theirs["loss"]) <= slope * weights_bound + bound
    return weights_bound


def last_attempts(written: list[Lines]) -> list[Lines]:
    """Without the steps that a later attempt has made again."""
    newest: dict[int, int] = {}
    for line in (line for lines in written for line in lines if "step" in line):
        newest[line["step"]] = max(newest.get(line["step"], 0), line["number"])
    return [
        [one for one in lines if "step" not in one or one["number"] == newest[one["step"]]]
        for lines in written
    ]
