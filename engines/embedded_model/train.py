"""Trains the embedded model: `python engines/embedded_model/train.py WORK_FOLDER`.

The work folder keeps the tokens and a checkpoint every few minutes; the same command goes on where it
stopped. At the end the checkpoint stands in WORK_FOLDER/model, in the Hugging Face layout.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus.mixture import Mixture
from muon import Muon
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from tokens import encode, save_tokenizer, train_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

NUM_TOKENS = 24_600_000
DISGUISED = 0.5  # share of samples whose questions are put into other words
NUM_STEPS = 6000
WARM_UP, DECAY = 0.02, 0.4  # shares of the steps in which the learning rates rise, and fall to zero
VOCAB_SIZE = 4096
MAX_LENGTH = 8192
ROW = 512  # tokens a row of a batch
SAVE_EVERY_S = 300
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: a step asks for the same 6 GB again, and the kernel would clear them.

    Does nothing elsewhere. A step takes 0.9 s instead of 1.2 s.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def model_config(vocab_size: int) -> Qwen3Config:
    """Return the model's shape: 4.7 million parameters."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def prepare(folder: Path, seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer and write the training tokens, unless they are there."""
    if (folder / "tokenizer").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    else:
        tokenizer = train_tokenizer(VOCAB_SIZE, seed=seed)
        save_tokenizer(tokenizer, folder / "tokenizer", max_length=MAX_LENGTH)
    if not (folder / "tokens.npy").exists():
        write_tokens(folder, tokenizer, seed + 1)
    return tokenizer


def write_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Write the tokens, and which of them are learnt."""
    mixture = Mixture(seed, disguised=DISGUISED)
    ids, learnt = np.empty(NUM_TOKENS, np.int16), np.empty(NUM_TOKENS, bool)
    done = 0
    with Progress() as progress:
        bar = progress.add_task("writing tokens", total=NUM_TOKENS)
        while done < NUM_TOKENS:
            part, mask = encode(islice(mixture, 2000), tokenizer)
            size = min(len(part), NUM_TOKENS - done)
            ids[done : done + size], learnt[done : done + size] = part[:size], mask[:size]
            done += size
            progress.update(bar, completed=done)
    np.save(folder / "learnt.npy", learnt)
    np.save(folder / "tokens.npy", ids)


class Rows:
    """The training tokens in rows, in an order that the seed fixes."""

    def __init__(self, folder: Path, batch_rows: int, seed: int) -> None:
        self._ids = np.load(folder / "tokens.npy", mmap_mode="r")
        self._learnt = np.load(folder / "learnt.npy", mmap_mode="r")
        self._batch_rows, self._seed = batch_rows, seed
        self.num_rows = (len(self._ids) - 1) // ROW
        self.batches_an_epoch = self.num_rows // batch_rows

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets (rows, ROW) of a step; a target that is not learnt is -100."""
        epoch, index = divmod(step, self.batches_an_epoch)
        order = np.random.default_rng(self._seed + epoch).permutation(self.num_rows)
        rows = order[index * self._batch_rows : (index + 1) * self._batch_rows]
        spans = rows[:, None] * ROW + np.arange(ROW + 1)
        ids = self._ids[spans].astype(np.int64)
        targets = np.where(self._learnt[spans], ids, -100)
        return torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets[:, 1:])


class Training:
    """The model, its two optimizers and how far it is."""

    def __init__(self, folder: Path, vocab_size: int, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Qwen3ForCausalLM(model_config(vocab_size)).train()
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.dim() != 2 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=0.02),
            torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self._rates = [group["lr"] for group in self._groups]
        self.step = 0
        self._path = folder / "training.pt"
        if self._path.exists():
            self._load()

    def run_step(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> float:
        """Learn from one batch, at a share of the full learning rates; return its loss, in nats a token."""
        for group, full in zip(self._groups, self._rates, strict=True):
            group["lr"] = full * rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=inputs).last_hidden_state
            wanted = targets != -100
            logits = self.model.lm_head(hidden[wanted])  # only where something is learnt
        loss = torch.nn.functional.cross_entropy(logits.float(), targets[wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def save(self) -> None:
        """Write the state beside the old one, then replace that."""
        state: dict[str, Any] = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)

    def _load(self) -> None:
        state = torch.load(self._path, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def rate_at(step: int) -> float:
    """Return the share of the full learning rates: it rises, holds, and falls to zero."""
    done = step / NUM_STEPS
    return min(1.0, done / WARM_UP + 0.01, (1 - done) / DECAY)


def train(folder: Path, training: Training, rows: Rows) -> Iterator[tuple[int, float]]:
    """Run the remaining steps; yields each step's number and loss, and saves every few minutes."""
    saved = time.monotonic()
    while training.step < NUM_STEPS:
        loss = training.run_step(*rows.batch(training.step), rate_at(training.step))
        yield training.step, loss
        if time.monotonic() - saved > SAVE_EVERY_S:
            training.save()
            saved = time.monotonic()
    training.save()


def export(training: Training, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint in the Hugging Face layout, in bfloat16."""
    model = training.model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, top_p=0.9, eos_token_id=[2, 0], pad_token_id=0
    )
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, max_length=MAX_LENGTH)


def main() -> None:
    """Prepare, train, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=8, help=f"rows of {ROW} tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    keep_freed_memory()
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare(options.folder, options.seed)
    training = Training(options.folder, len(tokenizer), seed=options.seed)
    rows = Rows(options.folder, options.rows, options.seed)
    columns = (
        *Progress.get_default_columns()[:-1],
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns) as progress, (options.folder / "loss.csv").open("a") as log:
        bar = progress.add_task("training", total=NUM_STEPS, completed=training.step, loss=0.0)
        smooth = 0.0
        for step, loss in train(options.folder, training, rows):
            smooth = loss if not smooth else 0.95 * smooth + 0.05 * loss
            progress.update(bar, completed=step, loss=smooth)
            if step % 20 == 0:
                print(f"{step},{smooth:.4f}", file=log, flush=True)
    export(training, tokenizer, options.folder / "model")


if __name__ == "__main__":
    main()
