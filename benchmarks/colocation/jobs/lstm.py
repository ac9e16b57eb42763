"""An LSTM that predicts the next token of random text: many small products, one after the other."""

import torch
from torch.utils.data import DataLoader

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(3)
data = torch.randint(64, (1024, 33))
embedding, lstm, head = (
    torch.nn.Embedding(64, 64),
    torch.nn.LSTM(64, 128, batch_first=True),
    torch.nn.Linear(128, 64),
)
model = torch.nn.ModuleList([embedding, lstm, head]).to(device)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(100_000):
    for batch in DataLoader(data, batch_size=16, shuffle=True):
        tokens = batch.to(device)
        hidden, _ = lstm(embedding(tokens[:, :-1]))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
