"""Which stored forms of weights each forward backend runs: `python benchmarks/models_table.py`.

Writes a small checkpoint in every layout and what its weights stand for, runs both with each backend, and
compares greedy answers and their log-probabilities. Prints the table, and writes docs/models.md with it
(`--into`), so that the page says what has been seen. Layouts that round activations are compared with the
backend torch, whose rounding tests compare with transformers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from common import machine_line, save
from safetensors.torch import save_file

from sagellm.accel.weights import WeightReader
from sagellm.core import SageLLMError, TensorSpec
from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.loading.gguf import GGUFFormat
from sagellm.engines.testing import make_checkpoint
from sagellm.engines.testing.gguf import copy_as_gguf
from sagellm.engines.testing.quantized import LAYOUTS, ROUNDED_ACTIVATIONS, quantized_copy

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BACKENDS = ("native", "torch", "cuda")
FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
GGUF_TYPES = ("F16", "BF16", "Q8_0", "Q4_0")
PROMPTS = [[5, 17, 300, 41, 8, 99], [7] * 3]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True)
INTRODUCTION = """# Models and stored forms

Which checkpoints run where. This page is written by `python benchmarks/models_table.py` from runs on small
random models; each cell is what was seen:

- **bits**: tokens and log-probabilities of greedy answers are those of the dequantized checkpoint (of a plain
  one, and of one whose activations are rounded: those of the backend torch), bit by bit
- **tokens**: the tokens are, and log-probabilities differ by at most the figure
- a reason: the backend refuses the form, and `auto` takes the next one

Families of our own are Qwen3, Qwen2, Llama and Mistral; other decoders run as classes of transformers with
the backend torch, with dequantized weights. What each format may contain:
[configuration.md](configuration.md#quantized-checkpoints). To write one: [quantization.md](quantization.md).
"""
Answer = tuple[list[list[int]], list[float]]


def answer(path: Path, backend: str) -> Answer:
    """Return greedy tokens and the log-probabilities of all of them. Raises SageLLMError."""
    with LLMEngine(model=str(path), forward_backend=backend, num_blocks=16) as engine:
        outputs = [output.outputs[0] for output in engine.generate(PROMPTS, GREEDY)]
    tokens = [list(output.token_ids) for output in outputs]
    chosen = [
        each[token].logprob
        for output in outputs
        for token, each in zip(output.token_ids, output.logprobs or [], strict=True)
    ]
    return tokens, chosen


def cell(run: Callable[[], Answer], expect: Callable[[], Answer]) -> str:
    """Say how an answer compares with the one that is expected."""
    try:
        tokens, chosen = run()
    except SageLLMError as error:
        return str(error).split("; ")[0].split(": ")[-1]
    expected_tokens, expected = expect()
    if tokens != expected_tokens:
        return "**other tokens**"
    furthest = max(abs(a - b) for a, b in zip(chosen, expected, strict=True))
    return "bits" if furthest == 0 else f"tokens, {furthest:.1g}"


def cells(path: Path, reference: Path | None) -> list[str]:
    """Return the cell of each backend: beside a dequantized checkpoint, or beside the backend torch."""
    found = []
    for backend in BACKENDS:
        if backend == "cuda" and not torch.cuda.is_available():
            found.append("not run: no device")
        elif reference is not None:
            found.append(cell(lambda: answer(path, backend), lambda: answer(reference, backend)))  # noqa: B023
        else:
            found.append(cell(lambda: answer(path, backend), lambda: answer(path, "torch")))  # noqa: B023
    return found


def dequantized(path: Path, like: Path, target: Path) -> Path:
    """Write what a GGUF file stands for as a checkpoint beside the tokenizer of another; return it."""
    opened = GGUFFormat().open(path)
    plain, rounded = WeightReader(opened.weights, torch.float32), WeightReader(opened.weights, torch.bfloat16)
    tensors = {
        name: (plain if len(each.shape) == 1 else rounded).load(TensorSpec(name, each.shape))
        for name, each in opened.weights.tensors.items()
    }
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((like / name).read_bytes())
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(dict(opened.config)), encoding="utf-8")
    return target


def table(folder: Path) -> list[str]:
    """Run everything, and return the lines of the table."""
    lines = ["| weights | " + " | ".join(BACKENDS) + " |", "|---|" + "---|" * len(BACKENDS)]

    def add(name: str, found: list[str]) -> None:
        lines.append(f"| {name} | " + " | ".join(found) + " |")
        print(lines[-1], flush=True)

    sizes = {"intermediate_size": 160, "head_dim": 32}
    for family in FAMILIES:
        path = make_checkpoint(folder / family, family=family, **sizes)
        add(f"{family}, float32", cells(path, None))
    original = make_checkpoint(folder / "original", **sizes)
    for layout in LAYOUTS:
        add(f"`{layout}`", cells(*quantized_copy(original, folder, layout)))
    for layout in ROUNDED_ACTIVATIONS:
        add(f"`{layout}`, activations rounded", cells(quantized_copy(original, folder, layout)[0], None))
    llama = make_checkpoint(folder / "llama", family="llama", dtype="bfloat16", **sizes)
    for kind in GGUF_TYPES:
        file = copy_as_gguf(llama, folder / f"{kind}.gguf", kind)
        add(f"GGUF {kind}", cells(file, dequantized(file, llama, folder / f"{kind}-dequantized")))
    return lines


def main() -> None:
    """Run, print and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=PAGE, help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = table(Path(folder))
    note = "`engines/tests/test_gguf_files.py` compares Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K in this way."
    save(options.into, "\n".join([INTRODUCTION, *lines, "", note, "", f"{machine_line()}.", ""]))


if __name__ == "__main__":
    main()
