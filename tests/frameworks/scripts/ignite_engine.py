"""An engine of pytorch-ignite with a moving average of the weights."""

from __future__ import annotations

import digest
import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import EMAHandler
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Dropout(0.2), nn.Linear(60, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), gradient_accumulation_steps=2)
averages = EMAHandler(model, momentum=0.01)
averages.attach(trainer, event=Events.ITERATION_COMPLETED)
rows = torch.utils.data.TensorDataset(torch.randn(256, 20), torch.randint(0, 4, (256,)))
trainer.run(torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True), max_epochs=3)
digest.tell(model.state_dict(), averages.ema_model.state_dict(), optimizer.state_dict())
