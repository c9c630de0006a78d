"""Compares our greedy tokens with those of `transformers`' generate."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby, product
from pathlib import Path
from typing import Any

import torch

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

NUM_OUTPUT_TOKENS = 64
MARGIN = 1e-4  # float32: a difference is allowed only below this top-2 margin of the reference

# name → the family and shape of its checkpoint; shapes are odd on purpose
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "head_dim": 96, "tie_word_embeddings": True},
    "qwen2": {
        "family": "qwen2",
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 7 * 16,
        "tie_word_embeddings": False,
    },
    "llama": {"family": "llama", "tie_word_embeddings": False},
    "llama-linear": {"family": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-llama3": {
        "family": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "llama-yarn": {
        "family": "llama",
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    },
    "llama-dynamic": {"family": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama-bias": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"family": "mistral", "sliding_window": 48},
    "fallback-1": {"family": "olmo2"},
    "fallback-2": {"family": "phi3"},
}


@dataclass(frozen=True)
class Case:
    """One way of running the engine; the reference does not depend on it."""

    checkpoint: str
    batch: str = "mixed"  # or "alone"
    prefix_caching: bool = True
    block_size: int = 16
    max_num_batched_tokens: int = 512
    pool: str = "ample"  # or "tight": so small that preemption happens
    forward: str = "auto"  # or "torch" with attention by name: "sdpa", "naive"
    num_prompts: int | None = None  # the first ones alone

    def __str__(self) -> str:
        cache = "cache" if self.prefix_caching else "nocache"
        return (
            f"{self.checkpoint}-{self.batch}-{cache}-b{self.block_size}-t{self.max_num_batched_tokens}"
            f"-{self.pool}-{self.forward}"
        )


AXES: dict[str, tuple[Any, ...]] = {
    "batch": ("mixed", "alone"),
    "prefix_caching": (True, False),
    "block_size": (16, 8, 128),
    "max_num_batched_tokens": (512, 17, 1),
    "pool": ("tight", "ample"),
    "forward": ("auto", "sdpa", "naive"),
}


def all_cases(checkpoints: Sequence[str]) -> list[Case]:
    """The full product; a tight pool only where there is a batch to preempt in."""
    cases = [
        Case(checkpoint, **dict(zip(AXES, values, strict=True)))
        for checkpoint in checkpoints
        for values in product(*AXES.values())
    ]
    return [case for case in cases if not (case.pool == "tight" and case.batch == "alone")]


def pairwise_cases(checkpoints: Sequence[str], seed: int = 0) -> list[Case]:
    """A small set in which every pair of values of two axes occurs; the checkpoint is one of the axes."""
    return list(_cover(all_cases(checkpoints), seed))


def _cover(cases: list[Case], seed: int) -> Iterator[Case]:
    shuffled = cases.copy()
    random.Random(seed).shuffle(shuffled)
    missing = {pair for case in cases for pair in _pairs(case)}
    while missing:
        best = max(shuffled, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        yield best


def _pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    values = [(axis, getattr(case, axis)) for axis in ("checkpoint", *AXES)]
    return set(combinations(values, 2))


@dataclass
class Reference:
    """What transformers generates for a checkpoint's prompts, with its top-2 margins; made when asked for."""

    path: Path
    model: Any
    long_prompts: list[list[int]]
    short_prompts: list[list[int]]
    tokens: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    margins: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    @classmethod
    def build(cls, folder: Path, name: str) -> Reference:
        """Make the checkpoint and load it in transformers, float32."""
        settings = dict(CHECKPOINTS[name])
        settings.setdefault("max_position_embeddings", 4096)
        path = make_checkpoint(folder / name, seed=sum(map(ord, name)), **settings)
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None  # every output has its full length
        vocab_size = model.config.vocab_size
        limit = 512 if "dynamic" in name else 4096
        long_prompts = make_prompts(vocab_size, LONG if limit == 4096 else [n for n in LONG if n < 400])
        return cls(path, model, long_prompts, make_prompts(vocab_size, ONE_BY_ONE))

    def generate(self, prompt: list[int]) -> list[int]:
        """Return the greedy continuation of a prompt."""
        self.prepare([prompt])
        return self.tokens[tuple(prompt)]

    def prepare(self, prompts: Sequence[list[int]]) -> None:
        """Generate what is missing in batches of similar lengths, ten times as fast as one by one."""
        missing = sorted({tuple(prompt) for prompt in prompts} - self.tokens.keys(), key=len)
        for _, batch in groupby(missing, lambda prompt: max(127, len(prompt)).bit_length()):
            self._generate(list(batch))

    def _generate(self, prompts: Sequence[tuple[int, ...]]) -> None:
        width = max(map(len, prompts))
        padded = [(0,) * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [(0,) * (width - len(prompt)) + (1,) * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=NUM_OUTPUT_TOKENS,
                output_logits=True,
                return_dict_in_generate=True,
            )
        top = torch.stack(out.logits, dim=1).float().topk(2).values  # (prompts, tokens, 2)
        for prompt, tokens, best in zip(prompts, out.sequences[:, width:], top, strict=True):
            self.tokens[prompt] = tokens.tolist()
            self.margins[prompt] = (best[:, 0] - best[:, 1]).tolist()


LONG = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 49, 63, 64, 65, 100, 127, 128, 129]
LONG += [200, 255, 256, 257, 300, 400, 511, 513, 700, 1000, 1800, 3000]  # 33 prompts
SHORT = [*range(1, 33), 64]  # 33 prompts
ONE_BY_ONE = [1, 2, 7, 8, 9, 15, 16, 17, 32, 33, 63, 64]
"""Prompts of which a step computes one token take a step for each."""


def make_prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts of which every other one begins like the one before it, so that prefixes are shared."""
    rng = random.Random(1234)
    prompts: list[list[int]] = []
    for index, length in enumerate(lengths):
        prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
        if index % 2 and prompts:
            shared = prompts[-1][: max(1, length * 3 // 4)]
            prompt[: len(shared)] = shared
        prompts.append(prompt)
    return prompts


@dataclass
class Comparison:
    """Tokens compared, and the differences that the reference's margins do and do not excuse.

    A prompt that many cases run is one sample of what the reference does: its tokens and a tie count once.
    """

    num_tokens: int = 0
    distinct: dict[tuple[Path, tuple[int, ...]], int] = field(default_factory=dict)
    ties: set[tuple[Path, tuple[int, ...], int]] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def add(self, reference: Reference, prompt: list[int], tokens: list[int], label: str) -> None:
        """Compare up to the first difference."""
        expected, key = reference.generate(prompt), tuple(prompt)
        self.num_tokens += len(expected)
        self.distinct[reference.path, key] = len(expected)
        if len(tokens) != len(expected):
            self.wrong.append(f"{label}: {len(tokens)} tokens instead of {len(expected)}")
        for position, (ours, theirs) in enumerate(zip(tokens, expected, strict=False)):
            if ours == theirs:
                continue
            margin = reference.margins[key][position]
            if margin < MARGIN:
                self.ties.add((reference.path, key, position))
            else:
                self.wrong.append(
                    f"{label}: prompt of {len(prompt)}, output {position}: {ours} instead of {theirs}, "
                    f"margin {margin:.2g}"
                )
            return

    @property
    def allowed(self) -> int:
        """Differences where the reference's own two best tokens are as good as equal."""
        return len(self.ties)

    @property
    def is_exact(self) -> bool:
        """Nothing wrong, and at most one allowed difference in 10,000 tokens: none in fewer."""
        return not self.wrong and self.allowed * 10_000 <= sum(self.distinct.values())

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.num_tokens + other.num_tokens,
            self.distinct | other.distinct,
            self.ties | other.ties,
            self.wrong + other.wrong,
        )


def make_engine(case: Case, reference: Reference, **settings: Any) -> LLMEngine:
    """Build the engine that a case asks for."""
    prompts = prompts_of(case, reference)
    longest = max(map(len, prompts)) + NUM_OUTPUT_TOKENS
    longest_blocks = -(-longest // case.block_size)
    total_blocks = sum(-(-(len(prompt) + NUM_OUTPUT_TOKENS) // case.block_size) for prompt in prompts)
    blocks = longest_blocks if case.pool == "tight" else total_blocks
    if case.forward != "auto":
        settings |= {"forward_backend": "torch", "attention_backend": case.forward}
    return LLMEngine(
        model=str(reference.path),
        dtype="float32",
        device="cpu",
        block_size=case.block_size,
        num_blocks=blocks,
        max_num_batched_tokens=case.max_num_batched_tokens,
        max_num_seqs=64,
        enable_prefix_caching=case.prefix_caching,
        **settings,
    )


def prompts_of(case: Case, reference: Reference) -> list[list[int]]:
    """The prompts of a case: short where a step computes one token, none very long in a tight pool."""
    prompts = reference.short_prompts if case.max_num_batched_tokens == 1 else reference.long_prompts
    if case.pool == "tight":
        prompts = [prompt for prompt in prompts if len(prompt) < 320]
    return prompts[: case.num_prompts]


def compare(case: Case, reference: Reference, engine: LLMEngine) -> Comparison:
    """Run a case twice over (the second time finds its prefixes cached) and compare every output."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    comparison = Comparison()
    prompts = prompts_of(case, reference)
    batches = [prompts] if case.batch == "mixed" else [[prompt] for prompt in prompts[::4]]
    reference.prepare([prompt for batch in batches for prompt in batch])
    for batch in batches:
        for prompt, output in zip(batch, engine.generate(batch, params), strict=True):
            comparison.add(reference, prompt, output.outputs[0].token_ids, str(case))
    return comparison
