"""A small GPT-2 by Hugging Face's Trainer: recomputed activations, evaluations, checkpoints, workers."""

from __future__ import annotations

import sys
import tempfile

import digest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(7)
tokens = torch.randint(0, 200, (160, 32))
rows = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=32, n_embd=64, n_layer=3, n_head=4))
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        num_train_epochs=2,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=7,
        save_steps=9,
        logging_steps=3,
        dataloader_num_workers=int(sys.argv[1]),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:24])
    trainer.train()
digest.tell(model.state_dict(), trainer.optimizer.state_dict())
