"""What quantized weights and KV cost in quality: `python benchmarks/quantization.py [MODEL]`.

The same tokens go through the engine's forward pass for each row, a configuration: `weights` or
`weights/kv`, where weights are a dtype, a quantizer or a pattern of sparsity, as in `bfloat16 int8/int8
int4 2:4`. Printed are KL(reference ‖ row) in nats per position, the share of positions with the same most
likely token, and the bytes of the weights. The tokens are text held out from the embedded model's training
or, for another model, random ones. A model that is not there is made, with the attention of an ordinary
initialization.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from common import report
from make_model import ensure

from sagellm.accel import kl_divergence
from sagellm.core import InputBatch, PluginRegistry, Runtime
from sagellm.engines.assembly import load_core
from sagellm.engines.config.schema import EngineConfig

NUM_TOKENS = 512
HELD_OUT_SEED = 1 << 40  # training draws with small seeds
DTYPES = ("float32", "bfloat16", "float16")


def compute_logits(model: str, prompts: list[list[int]], row: str, backend: str) -> tuple[torch.Tensor, int]:
    """Return the logits (tokens, vocab) of all prompts and the bytes of the weights."""
    weights, _, kv = row.partition("/")
    kind = "sparsity" if re.fullmatch(r"\d+:\d+", weights) else "quantization"
    settings = {"dtype": weights} if weights in DTYPES else {"dtype": "bfloat16", kind: weights}
    config = EngineConfig.from_flat(
        model=model, forward_backend=backend, kv_cache_dtype=kv or "auto", num_blocks=256, **settings
    )
    core = load_core(config, registry=PluginRegistry.load(), runtime=Runtime.system())
    try:
        logits = torch.cat([_prefill(core, tokens) for tokens in prompts])
        return logits, core.runner.backend.model_metrics().weight_bytes
    finally:
        core.close()


def _prefill(core: Any, tokens: list[int]) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    block_size = core.info.layout.block_size
    logits: torch.Tensor = core.runner.backend.forward(
        InputBatch(
            input_ids=torch.tensor(tokens),
            position_ids=positions,
            slot_mapping=positions,
            block_tables=torch.arange(-(-len(tokens) // block_size))[None],
            query_lens=[len(tokens)],
            seq_lens=[len(tokens)],
            logits_indices=positions,
        )
    )
    return logits.clone()


def held_out_text(num_prompts: int) -> list[list[int]]:
    """Return prompts from dialogues drawn as the embedded model's training text was, with another seed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "embedded_model"))
    from corpus.mixture import Mixture
    from corpus.sample import Passage

    from sagellm.engines.embedded import embedded_model
    from sagellm.engines.loading.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(embedded_model())
    samples, tokens = Mixture(HELD_OUT_SEED), []
    while len(tokens) < num_prompts * NUM_TOKENS:
        sample = next(samples)
        if not isinstance(sample, Passage):
            messages = [{"role": each.role, "content": each.content} for each in sample.messages]
            tokens += tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return [tokens[begin : begin + NUM_TOKENS] for begin in range(0, num_prompts * NUM_TOKENS, NUM_TOKENS)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--prompts", type=int, default=16, help="of 512 tokens each")
    parser.add_argument("--against", default="float32", help="the reference: a row")
    parser.add_argument("--rows", nargs="*", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--backend", default="auto", help="forward backend")
    options = parser.parse_args()
    if options.model == "embedded":
        model, prompts = options.model, held_out_text(options.prompts)
    else:
        model = str(ensure(Path(options.model), sharpness=1 / 3))
        rng = random.Random(0)
        prompts = [[rng.randrange(3, 20_000) for _ in range(NUM_TOKENS)]]
    reference, _ = compute_logits(model, prompts, options.against, options.backend)
    figures = {}
    for row in options.rows:
        logits, weight_bytes = compute_logits(model, prompts, row, options.backend)
        agreement = (logits.argmax(-1) == reference.argmax(-1)).double().mean().item()
        figures[row] = {
            "kl_nats": kl_divergence(reference, logits),
            "same_top_token": round(agreement, 4),
            "weights_mib": round(weight_bytes / 2**20, 1),
        }
    report("quantization", tokens=len(prompts) * NUM_TOKENS, against=options.against, **figures)


if __name__ == "__main__":
    main()
