"""A transformer encoder of two layers on random tokens."""

import torch
from torch.utils.data import DataLoader

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(4)
data = torch.randint(64, (1024, 32))
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
model = torch.nn.Sequential(torch.nn.Embedding(64, 64), encoder, torch.nn.Linear(64, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100_000):
    for batch in DataLoader(data, batch_size=8, shuffle=True):
        tokens = batch.to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
