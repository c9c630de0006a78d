"""Trains the networks of learnt predictors on requests of a trace, with torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sagellm.core import ConfigError
from sagellm.core.protocols.lifetime import TrainingEpoch
from sagellm.kvmgr.lifetime.features import (
    MAX_LEVELS,
    MAX_TEXT,
    NUM_NUMBERS,
    NUM_OF_LEVEL,
    NUM_WORDS,
    Features,
)
from sagellm.kvmgr.lifetime.lengths import NUM_BINS, bin_of, lengths_at, quantiles
from sagellm.kvmgr.lifetime.network import NUM_HEADS, NUM_LAYERS, WIDTH, Network

_MIN_EXAMPLES = 50
_HELD_BACK = 0.15
_BATCH_SIZE, _LEARNING_RATE = 128, 2e-3
_SOFTNESS = 2.0  # bins: nearly right is nearly as good


class Batch(NamedTuple):
    """Features of several requests, padded."""

    known: Tensor  # (requests, numbers and levels)
    text: Tensor  # (requests, tokens), 0 behind what is there
    place: Tensor  # (requests, tokens), counted from the end of the prompt
    num_words: Tensor  # (requests,)

    @classmethod
    def of(cls, features: Sequence[Features]) -> Batch:
        """Pad features to the longest."""
        num, most = len(features), max(1, *(len(one.text) for one in features))
        known = np.zeros((num, NUM_NUMBERS + MAX_LEVELS * (NUM_OF_LEVEL + 1)), np.float32)
        text, place = np.zeros((num, most), np.int64), np.zeros((num, most), np.int64)
        for row, one in enumerate(features):
            num_levels, num_words = len(one.levels), len(one.text)
            known[row, :NUM_NUMBERS] = one.numbers
            known[row, NUM_NUMBERS : NUM_NUMBERS + one.levels.size] = one.levels.ravel()
            known[row, len(known[row]) - MAX_LEVELS :][:num_levels] = 1
            text[row, :num_words] = one.text
            place[row, :num_words] = np.arange(MAX_TEXT - num_words, MAX_TEXT)
        num_words_of = np.array([len(one.text) for one in features])
        return cls(*map(torch.from_numpy, (known, text, place, num_words_of)))

    def rows(self, index: Tensor) -> Batch:
        """Return some of the requests."""
        return Batch(*(each[index] for each in self))


class TorchNetwork(nn.Module, ABC):
    """What `network` computes, for training: the names of its weights are theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH, padding_idx=0)
        nn.init.normal_(self.words.weight, std=0.1)
        self.place = nn.Parameter(0.02 * torch.randn(MAX_TEXT, WIDTH))
        self.drop = nn.Dropout(0.2)
        num_known = NUM_NUMBERS + MAX_LEVELS * (NUM_OF_LEVEL + 1)
        self.known = nn.Sequential(nn.Linear(num_known, 64), nn.GELU("tanh"), self.drop)
        self.head = nn.Sequential(
            nn.Linear(64 + WIDTH, 64), nn.GELU("tanh"), self.drop, nn.Linear(64, NUM_BINS)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits (requests, bins)."""
        is_there = batch.text > 0
        words = self.drop(self.words(batch.text) + self.place[batch.place]) * is_there[..., None]
        read = self.read(words, is_there, batch.num_words) * (batch.num_words > 0)[:, None]
        logits: Tensor = self.head(torch.cat((self.known(batch.known), read), 1))
        return logits

    @abstractmethod
    def read(self, words: Tensor, is_there: Tensor, num_words: Tensor) -> Tensor:
        """Return (requests, width) of the words (requests, n, width)."""


class LSTM(TorchNetwork):
    """Reads the text with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def read(self, words: Tensor, is_there: Tensor, num_words: Tensor) -> Tensor:
        """Return the last state and the mean of all, added."""
        states, _ = self.lstm(words)
        states = states * is_there[..., None]
        last = (num_words - 1).clamp(min=0)[:, None, None].expand(-1, 1, WIDTH)
        read: Tensor = states.gather(1, last)[:, 0] + states.sum(1) / num_words.clamp(min=1)[:, None]
        return read


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU("tanh"), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, state: Tensor, mask: Tensor) -> Tensor:
        num, length, _ = state.shape
        qkv = self.qkv(self.norm(state)).view(num, length, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=mask)
        state = state + self.out(mixed.transpose(1, 2).reshape(num, length, WIDTH))
        fed: Tensor = state + self.feed(state)
        return fed


class Transformer(TorchNetwork):
    """Reads the text with layers of self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(NUM_LAYERS))

    def read(self, words: Tensor, is_there: Tensor, num_words: Tensor) -> Tensor:
        """Return the mean over the text."""
        state = words
        mask = (is_there | (num_words == 0)[:, None])[:, None, None, :]  # without text, anything will do
        for block in self.blocks:
            state = block(state, mask)
        return (state * is_there[..., None]).sum(1) / num_words.clamp(min=1)[:, None]


TORCH_NETWORKS: dict[str, type[TorchNetwork]] = {"lstm": LSTM, "transformer": Transformer}


def train(
    kind: str,
    examples: Sequence[tuple[Features, int]],
    *,
    num_epochs: int,
    seed: int,
    tell: Callable[[TrainingEpoch], None],
) -> Network:
    """Train a network on the examples, which are in order of time; return it as after its best epoch.

    The last 15 % of the examples are not trained on: they choose the epoch. Raises ConfigError for fewer
    than 50 examples. Equal calls give equal networks on one machine.
    """
    if len(examples) < _MIN_EXAMPLES:
        raise ConfigError(f"{len(examples)} requests teach nothing; at least {_MIN_EXAMPLES} are needed")
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        network = TORCH_NETWORKS[kind]()
        batch = Batch.of([features for features, _ in examples])
        lengths = torch.tensor([length for _, length in examples], dtype=torch.float64)
        places = torch.tensor([bin_of(length) for _, length in examples])
        cut = len(examples) - max(1, round(_HELD_BACK * len(examples)))
        optimizer = torch.optim.AdamW(network.parameters(), lr=_LEARNING_RATE, weight_decay=0.05)
        num_batches = -(-cut // _BATCH_SIZE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, _LEARNING_RATE, total_steps=num_epochs * num_batches
        )
        lowest = math.inf
        best: dict[str, Tensor] = {}
        for number in range(1, num_epochs + 1):
            network.train()
            total = 0.0
            for index in torch.split(torch.randperm(cut), _BATCH_SIZE):
                loss: Any = _loss(network(batch.rows(index)), places[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += float(loss.detach()) * len(index)
            network.eval()
            with torch.inference_mode():
                rows = torch.split(torch.arange(cut, len(examples)), 512)
                logits = torch.cat([network(batch.rows(index)) for index in rows])
                held_back_loss = float(_loss(logits, places[cut:]))
                error = mean_error(logits, lengths[cut:])
            tell(TrainingEpoch(number, total / cut, held_back_loss, error))
            if held_back_loss <= lowest:
                lowest = held_back_loss
                best = {name: value.clone() for name, value in network.state_dict().items()}
    return Network(kind, {name: value.numpy() for name, value in best.items()})


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in this thread: for tensors as small, several are slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def mean_error(logits: Tensor, lengths: Tensor) -> float:
    """Return the mean absolute error, in tokens, of the medians of densities."""
    cumulated = np.zeros((len(logits), NUM_BINS + 1))
    np.cumsum(torch.softmax(logits.double(), 1).numpy(), 1, out=cumulated[:, 1:])
    medians = lengths_at(quantiles(cumulated, np.zeros((len(logits), 1)), np.array([0.5])))[:, 0]
    return float(np.abs(medians - lengths.numpy()).mean())


def _loss(logits: Tensor, places: Tensor) -> Tensor:
    distance = torch.arange(NUM_BINS)[None] - places[:, None]
    return functional.cross_entropy(logits, torch.softmax(-(distance**2) / (2 * _SOFTNESS**2), 1))
