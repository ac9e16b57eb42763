"""skorch, whose loop is behind scikit-learn's ``fit``."""

from __future__ import annotations

import digest
import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch import nn

torch.manual_seed(0)
draw = np.random.default_rng(0)
np.random.seed(0)  # scikit-learn divides the data by it
network = NeuralNetClassifier(
    nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Dropout(0.3), nn.Linear(50, 3), nn.Softmax(-1)),
    max_epochs=6,
    lr=0.05,
    iterator_train__shuffle=True,
    batch_size=16,
    verbose=0,
)
network.fit(draw.standard_normal((320, 20), dtype=np.float32), draw.integers(0, 3, 320))
digest.tell(network.module_.state_dict(), network.optimizer_.state_dict())
