"""Graphs by PyTorch Geometric, whose DataLoader makes batches of its own kind."""

from __future__ import annotations

import digest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

torch.manual_seed(0)
graphs = [
    Data(x=torch.randn(12, 8), edge_index=torch.randint(0, 12, (2, 40)), y=torch.randint(0, 3, (1,)))
    for _ in range(120)
]


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(8, 32), GCNConv(32, 32)
        self.last = torch.nn.Linear(32, 3)

    def forward(self, graph: Data) -> torch.Tensor:
        hidden = torch.dropout(self.first(graph.x, graph.edge_index).relu(), 0.2, self.training)
        hidden = self.second(hidden, graph.edge_index).relu()
        return self.last(global_mean_pool(hidden, graph.batch))


model = Network()
optimizer = torch.optim.RMSprop(model.parameters(), 1e-3, momentum=0.5)
for _ in range(4):
    for graph in DataLoader(graphs, batch_size=10, shuffle=True, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(graph), graph.y).backward()
        optimizer.step()
digest.tell(model.state_dict(), optimizer.state_dict())
