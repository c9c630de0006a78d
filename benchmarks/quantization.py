"""What quantized weights cost in quality: `python benchmarks/quantization.py MODEL`.

The same 512 random tokens go through the engine's forward pass with float32 weights, with bfloat16
ones, and quantized. Printed are KL(float32 ‖ it) in nats a position, the share of positions with the
same most likely token, and the bytes of the weights. The bfloat16 row is the noise to compare with. A
model that is not there is made, with the attention of an ordinary initialization.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from common import report
from make_model import ensure

from sagellm.accel import kl_divergence
from sagellm.core import InputBatch, KVLayout, PluginRegistry
from sagellm.engines.config import ModelConfig
from sagellm.engines.loading import open_model

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def compute_logits(path: Path, tokens: list[int], dtype: str, quantizer: Any) -> tuple[torch.Tensor, int]:
    """Return the logits (tokens, vocab) of one prefill and the bytes of the weights."""
    registry = PluginRegistry.load()
    settings = ModelConfig(name=str(path), dtype=dtype)
    opened = open_model(settings, registry)
    sizes = opened.spec.geometry
    attention = registry.resolve("attention_backend", "sdpa")(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        block_size=BLOCK_SIZE,
    )
    backend = registry.resolve("forward_backend", "torch")(
        opened.spec,
        opened.weights,
        device=CPU,
        dtype=opened.dtype,
        attention=attention,
        quantizer=quantizer,
    )
    (group,) = opened.spec.kv_groups(opened.dtype_name)
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    backend.initialize_kv_caches([KVLayout(group=group, block_size=BLOCK_SIZE)], [num_blocks])
    positions = torch.arange(len(tokens))
    logits = backend.forward(
        InputBatch(
            input_ids=torch.tensor(tokens),
            position_ids=positions,
            slot_mapping=positions,
            block_tables=torch.arange(num_blocks)[None],
            query_lens=[len(tokens)],
            seq_lens=[len(tokens)],
            logits_indices=positions,
        )
    )
    return logits, backend.model_metrics().weight_bytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--quantizers", nargs="*", default=["int8"])
    options = parser.parse_args()
    path = ensure(options.model, sharpness=1 / 3)
    rng = random.Random(0)
    tokens = [rng.randrange(3, 20_000) for _ in range(options.tokens)]
    reference, _ = compute_logits(path, tokens, "float32", None)
    registry = PluginRegistry.load()
    figures = {}
    for name in [None, *options.quantizers]:
        quantizer = None if name is None else registry.resolve("quantizer", name)(None)
        logits, weight_bytes = compute_logits(path, tokens, "bfloat16", quantizer)
        agreement = (logits.argmax(-1) == reference.argmax(-1)).double().mean().item()
        figures[name or "bfloat16"] = {
            "kl_nats": kl_divergence(reference, logits),
            "same_top_token": round(agreement, 4),
            "weights_mib": round(weight_bytes / 2**20, 1),
        }
    report("quantization", tokens=len(tokens), against="float32", **figures)


if __name__ == "__main__":
    main()
