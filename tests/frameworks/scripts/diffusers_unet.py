"""A small U-Net of diffusers: recomputed activations, moving averages, a schedule of noise."""

from __future__ import annotations

import digest
import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(32, 32),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
model.enable_gradient_checkpointing()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, 4, 30)
averages = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True)
noises = DDPMScheduler(100)
loader = torch.utils.data.DataLoader(torch.randn(64, 1, 16, 16), batch_size=8, shuffle=True)
for _ in range(3):
    for images in loader:
        noise, times = torch.randn_like(images), torch.randint(0, 100, (len(images),))
        found = model(noises.add_noise(images, noise, times), times).sample
        torch.nn.functional.mse_loss(found, noise).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        averages.step(model.parameters())
digest.tell(model.state_dict(), list(averages.shadow_params), optimizer.state_dict())
