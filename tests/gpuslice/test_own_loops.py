"""Loops with neither DataLoader nor torch optimizer: suspended at every boundary, they change no bit."""

from __future__ import annotations

import json

from gpuslice.checkpoint.discover.live_graphs import REASON
from gpuslice.runtime.boundaries import EVALUATION_CALLS

from .conftest import Workshop

#: Each shape in a function; all start from the same seed and print a digest.
LOOPS = """
import hashlib
import numpy as np
import torch
from torch import nn

def digest(*tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:16]

def language_model():
    # A hidden state that is carried over, clipped gradients, parameters moved by hand.
    torch.manual_seed(0)
    embed, rnn, out = nn.Embedding(50, 32), nn.LSTM(32, 64, 2, dropout=0.2), nn.Linear(64, 50)
    parts = [embed, rnn, out]
    data = torch.randint(0, 50, (61, 4))
    hidden = (torch.zeros(2, 4, 64), torch.zeros(2, 4, 64))
    for start in range(0, 60, 10):
        for part in parts:
            part.zero_grad()
        hidden = tuple(state.detach() for state in hidden)
        found, hidden = rnn(embed(data[start : start + 10]), hidden)
        loss = nn.functional.cross_entropy(out(found).view(-1, 50), data[start + 1 : start + 11].view(-1))
        loss.backward()
        parameters = [p for part in parts for p in part.parameters()]
        norm = nn.utils.clip_grad_norm_(parameters, 0.25)
        for p in parameters:
            p.data.add_(p.grad, alpha=-2.0)
    return digest(*parameters, *hidden, loss, norm)

def accumulated():
    # Gradients add up over passes, and a graph outlives the first of them.
    torch.manual_seed(1)
    w = torch.randn(300, 100, requires_grad=True)
    for step in range(3):
        hidden = torch.tanh(torch.randn(40, 300) @ w)
        loss = nn.functional.cross_entropy(hidden, torch.arange(40))
        loss.backward(retain_graph=True)
        (loss / 2 + hidden.pow(2).mean()).backward()
        w.data.sub_(w.grad, alpha=0.1)
        if step % 2:
            w.grad.zero_()
    return digest(w, w.grad)

def driven_from_outside():
    # As SciPy drives a model: vectors go in, NumPy arrays of values and slopes come out.
    torch.manual_seed(2)
    a, b = torch.randn(200, 100, dtype=torch.double), torch.randn(200, dtype=torch.double)
    def function(x):
        theta = torch.from_numpy(x).requires_grad_()
        loss = torch.nn.functional.softplus(a @ theta - b).sum() + theta.square().sum()
        (slope,) = torch.autograd.grad(loss, theta, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), theta)
        return loss.item(), slope.detach().numpy(), bend.numpy()
    x = np.zeros(100)
    for _ in range(4):
        value, slope, bend = function(x)
        x = x - slope / np.abs(bend).max()
    return hashlib.sha256(x.tobytes() + repr(value).encode()).hexdigest()[:16]

def generation():
    torch.manual_seed(3)
    model = nn.GRUCell(32, 32)
    table = torch.randn(32, 32)
    model.eval()
    tokens, state = [1], torch.zeros(1, 32)
    with torch.no_grad():
        while len(tokens) < CALLS:
            state = model(table[tokens[-1]][None], state)
            tokens.append(int(torch.multinomial(torch.softmax(state @ table, -1), 1)))
    return digest(state), tokens

for loop in (language_model, accumulated, driven_from_outside, generation):
    print(loop.__name__, loop())
""".replace("CALLS", str(EVALUATION_CALLS + 5))


def test_every_shape_ends_bit_identical(warm_workshop: Workshop) -> None:
    warm_workshop.write("loops.py", LOOPS)
    plain = warm_workshop.python("loops.py")
    ours = warm_workshop.gpuslice_run("--suspend-every", "1", "--report", "r.json", "loops.py")
    assert plain.stdout.count("\n") == 4, plain.stderr
    assert (ours.returncode, ours.stdout) == (0, plain.stdout), ours.stderr
    report = json.loads((warm_workshop.directory / "r.json").read_text())
    # 6 passes, 3 times 2, 4 times 2, and the 4 calls after the first that are not counted.
    assert [switch["boundary"] for switch in report["switches"]] == list(range(1, 25))
    held = [switch["resident"].get(REASON, 0) for switch in report["switches"]]
    # Between two passes over one graph: what the loss has saved (40 x 100 floats), and nothing afterwards.
    assert [nbytes >= 16_000 for nbytes in held[6:12]] == [True, False] * 3
    assert report["totals"]["steps"] == 0
