"""Runs the small networks of learnt predictors, in numpy: torch would cost more than what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sagellm.core import ConfigError
from sagellm.kvmgr.lifetime.features import MAX_LEVELS, MAX_TEXT, NUM_NUMBERS, NUM_OF_LEVEL, Features
from sagellm.kvmgr.lifetime.lengths import Floats

Array = npt.NDArray[np.float32]

WIDTH, NUM_HEADS, NUM_LAYERS = 32, 2, 2
FORMAT = "sagellm-lifetime-network 1"


class Network:
    """Says from a request's features how long its output may be, with weights named as `training` names them.

    numbers and levels ─▶ known ─┐
    text ─▶ lstm or transformer ─┴▶ head ─▶ logits over bins
    """

    def __init__(self, kind: str, weights: Mapping[str, Array]) -> None:
        self.kind, self.weights = kind, dict(weights)
        self._read = _READERS[kind]

    def density(self, features: Features) -> Floats:
        """Return the density (bins,) for one request."""
        weights = self.weights
        levels = np.zeros((MAX_LEVELS, NUM_OF_LEVEL), np.float32)
        levels[: len(features.levels)] = features.levels
        has_level = np.arange(MAX_LEVELS) < len(features.levels)
        table = np.concatenate((features.numbers, levels.ravel(), has_level), dtype=np.float32)
        known = _gelu(_linear(weights, "known.0", table))
        num_words = len(features.text)
        read = np.zeros(WIDTH, np.float32)
        if num_words:
            words = weights["words.weight"][features.text] + weights["place"][MAX_TEXT - num_words :]
            read = self._read(weights, words)
        hidden = _gelu(_linear(weights, "head.0", np.concatenate((known, read))))
        logits = _linear(weights, "head.3", hidden).astype(np.float64)
        scaled = np.exp(logits - logits.max())
        found: Floats = scaled / scaled.sum()
        return found


def _read_lstm(weights: Mapping[str, Array], words: Array) -> Array:
    """Return the last state and the mean of all, added: (width,) of (words, width)."""
    inputs = words @ weights["lstm.weight_ih_l0"].T + weights["lstm.bias_ih_l0"] + weights["lstm.bias_hh_l0"]
    # All gates in one: sigmoid(x) = 1 / (1 + exp(-x)), tanh(x) = 2 · sigmoid(2 x) - 1.
    scale = np.full(4 * WIDTH, -1, np.float32)
    scale[2 * WIDTH : 3 * WIDTH] = -2
    inputs *= scale
    recurrent = np.ascontiguousarray(weights["lstm.weight_hh_l0"].T * scale)
    gates = np.empty(4 * WIDTH, np.float32)
    taken, kept, new, shown = gates.reshape(4, WIDTH)
    states = np.zeros((1 + len(words), WIDTH), np.float32)
    cell = np.zeros(WIDTH, np.float32)
    for row, before, state in zip(inputs, states, states[1:], strict=False):
        np.dot(before, recurrent, out=gates)
        gates += row
        np.exp(gates, out=gates)
        gates += 1
        np.reciprocal(gates, out=gates)
        new *= 2
        new -= 1
        new *= taken
        cell *= kept
        cell += new
        np.tanh(cell, out=state)
        state *= shown
    found: Array = states[-1] + states[1:].mean(0)
    return found


def _read_transformer(weights: Mapping[str, Array], words: Array) -> Array:
    """Return the mean of the states after all layers: (width,) of (words, width)."""
    state, num_words = words, len(words)
    for layer in range(NUM_LAYERS):
        name = f"blocks.{layer}"
        qkv = _linear(weights, f"{name}.qkv", _norm(weights, f"{name}.norm", state))
        query, key, value = qkv.reshape(num_words, 3, NUM_HEADS, -1).transpose(1, 2, 0, 3)
        scores = query @ key.transpose(0, 2, 1) * np.float32((NUM_HEADS / WIDTH) ** 0.5)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares @ value) / shares.sum(-1, keepdims=True)
        state = state + _linear(weights, f"{name}.out", mixed.transpose(1, 0, 2).reshape(num_words, WIDTH))
        fed = _gelu(_linear(weights, f"{name}.feed.1", _norm(weights, f"{name}.feed.0", state)))
        state = state + _linear(weights, f"{name}.feed.3", fed)
    found: Array = state.mean(0)
    return found


_READERS = {"lstm": _read_lstm, "transformer": _read_transformer}


def _linear(weights: Mapping[str, Array], name: str, inputs: Array) -> Array:
    found: Array = inputs @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return found


def _norm(weights: Mapping[str, Array], name: str, inputs: Array) -> Array:
    centred = inputs - inputs.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    found: Array = centred / np.sqrt(variance + np.float32(1e-5)) * weights[f"{name}.weight"]
    return found + weights[f"{name}.bias"]


def _gelu(values: Array) -> Array:
    """Approximate GELU by tanh, as in training."""
    inner = np.float32(0.7978845608) * (values + np.float32(0.044715) * values * values * values)
    found: Array = np.float32(0.5) * values * (1 + np.tanh(inner))
    return found


def save_network(network: Network, path: Path) -> None:
    """Write a network's weights, as safetensors."""
    save_file(network.weights, path, {"format": FORMAT, "kind": network.kind})


def load_network(kind: str, path: str) -> Network:
    """Read what `sage llm predictor train` wrote. Raises ConfigError for anything else."""
    try:
        with safe_open(path, framework="np") as file:
            head = file.metadata() or {}
            weights: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path!r} with a predictor's weights; `sage llm predictor train` writes one"
        ) from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path!r} has no weights of a predictor: {error}") from error
    if head.get("format") != FORMAT:
        raise ConfigError(f"{path!r} was not written by `sage llm predictor train`, or by another version")
    if head.get("kind") != kind:
        raise ConfigError(f"{path!r} has the weights of the predictor {head.get('kind')}, not of {kind}")
    network = Network(kind, weights)
    try:
        network.density(_SAMPLE)
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"the weights in {path!r} do not fit the predictor {kind}: {error}") from error
    return network


_SAMPLE = Features(
    np.zeros(NUM_NUMBERS, np.float32),
    np.zeros((MAX_LEVELS, NUM_OF_LEVEL), np.float32),
    np.arange(1, MAX_TEXT + 1),
)
