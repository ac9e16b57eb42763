"""LoRA on a small Llama by Hugging Face's Trainer, in bfloat16, with Adafactor."""

from __future__ import annotations

import tempfile

import digest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(9)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
)
model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (96, 24))]
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        optim="adafactor",
        bf16=True,
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
digest.tell(model.state_dict(), trainer.optimizer.state_dict())
