"""A small GPT-2 by Hugging Face's Trainer, with random masks of its collator, dropout, and early stopping.

Words: loader workers, accumulated micro-batches, ``group`` or ``shuffle``. While there is a file
``slowly``, a step takes half a second.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import digest
import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

workers, accumulated, order = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Rows(torch.utils.data.Dataset):
    """Rows of several lengths; a few tokens of each are drawn anew whenever it is fetched."""

    def __init__(self) -> None:
        self.rows = [torch.randint(0, 200, (8 + number % 24,)) for number in range(120)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = self.rows[number].clone()
        row[torch.randint(0, len(row), (2,))] = torch.randint(0, 200, (2,))
        return {"input_ids": row, "labels": row}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.where(torch.rand(ids.shape) < 0.8, ids, -100)
    return {"input_ids": ids, "labels": labels}


class Tell(TrainerCallback):
    """Prints each step, and keeps a count that changes the learning rate."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args, state, control, optimizer=None, **named):  # type: ignore[no-untyped-def]
        self.steps += 1
        print("step", state.global_step, self.steps, flush=True)
        time.sleep(0.5 if Path("slowly").exists() else 0)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * (self.steps % 5)


set_seed(7)
data = Rows()
model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=32, n_embd=32, n_layer=2, n_head=2))
grouping = {"group": {"group_by_length": True}, "shuffle": {}}[order]
if order == "group" and not hasattr(TrainingArguments, "group_by_length"):
    grouping = {"train_sampling_strategy": "group_by_length"}
# No loss improves by 100: the training stops after its third epoch.
stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=100.0)
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulated,
        num_train_epochs=4,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        metric_for_best_model="loss",
        greater_is_better=False,
        save_strategy="epoch",
        logging_steps=3,
        dataloader_num_workers=workers,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **grouping,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=[data[number] for number in range(16)],
        data_collator=collate,
        callbacks=[stop, Tell()],
    )
    trainer.train()
assert trainer.state.epoch == 3, "it did not stop early"
digest.tell(model.state_dict(), trainer.optimizer.state_dict())
