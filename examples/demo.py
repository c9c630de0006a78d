"""Build a small checkpoint, generate from it, and show what was measured: `hatch run demo`.

The weights are random, so the text means nothing; everything around them is real.
"""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

CHECKPOINT = Path(__file__).parent.parent / ".demo" / "qwen3-random"
SYSTEM = "You are a helpful assistant that answers in one short sentence. "
PROMPTS = [
    SYSTEM + "What is a KV cache?",
    SYSTEM + "What does a scheduler do?",
    SYSTEM + "Why are blocks shared?",
]


def main() -> None:
    """Generate three times with one shared beginning and print a table."""
    console = Console()
    if not (CHECKPOINT / "config.json").exists():
        console.print("building a small random checkpoint …")
        make_checkpoint(CHECKPOINT, family="qwen3", seed=0)
    engine = LLMEngine(model=CHECKPOINT, num_blocks=512)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=48)
    table = Table("prompt", "output", "TTFT", "TPOT", "tokens/s", "cached tokens")
    for prompt in PROMPTS:
        output = engine.generate(prompt, params)[0]
        completion, metrics = output.outputs[0], output.metrics
        table.add_row(
            prompt.removeprefix(SYSTEM),
            repr(completion.text[:40]),
            f"{(metrics.ttft or 0) * 1e3:.1f} ms",
            f"{(metrics.tpot or 0) * 1e3:.2f} ms",
            f"{metrics.throughput or 0:.0f}",
            f"{output.num_cached_tokens} of {len(output.prompt_token_ids)}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
