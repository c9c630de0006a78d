"""Peak memory of each format of weights beside what is stored: `python benchmarks/format_memory.py`.

Writes the 0.6B-shape model in each format, one after the other, and starts a process that loads it, fills
every block of its KV cache but one and generates 32 tokens. Printed are the bytes of the weights in the file
and in memory, those of the KV cache, the peak of the process (VmHWM: mapped pages of the file count too), and
what the peak is above stored bytes and KV. Exits with 1 if that is more than --limit for a format.

`--only int4 Q4_K_M` chooses formats; `--folder` keeps the files for the next time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import output_flags, publish
from make_model import ensure

LIMIT_MIB = 300
NUM_BLOCKS, NUM_TOKENS = 64, 32
QUANTIZED = {
    **{text: text for text in ("int8", "w8a8", "fp8", "int4", "w4a8")},
    "int4 asymmetric": "int4{asymmetric=true}",
}
"""Formats of `sage llm quantize`."""
LAYOUTS = {
    **{name: name for name in ("gptq-int4", "gptq-int4-order", "gptq-int8", "awq", "mxfp4")},
    **{name: name for name in ("torchao-int8", "torchao-int4", "torchao-int4-plain", "torchao-fp8")},
    "fp8 blocks": "fp8",
}
"""Laid out as each format's description says, by sagellm.engines.testing, in groups and blocks of 32."""
GGUF = ("F16", "Q8_0", "Q4_0")
K_TYPES = {"Q4_K": (0, 2), "Q6_K": (208,)}
"""Types that have no writer here, of random codes, and where a block has its float16 scales."""


def measure(model: str) -> dict[str, float]:
    """Load a model in this process, use its whole cache, and return sizes in MiB."""
    from sagellm.engines import LLMEngine, SamplingParams
    from sagellm.engines.machine import peak_rss_mib

    with LLMEngine(model=model, dtype="bfloat16", num_blocks=NUM_BLOCKS, device="cpu") as engine:
        loaded = peak_rss_mib()
        prompt = [5 + i % 1000 for i in range((NUM_BLOCKS - 1) * engine.layout.block_size - NUM_TOKENS)]
        engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True))
        return {
            "held_mib": engine.metrics().modules["model_family"].weight_bytes / 2**20,
            "kv_mib": engine.layout.block_bytes * NUM_BLOCKS / 2**20,
            "loaded_mib": loaded,
            "peak_mib": peak_rss_mib(),
        }


def by_command(model: Path, target: Path, text: str) -> None:
    """Write a checkpoint with `sage llm quantize`."""
    program = "from sagellm.engines.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        program,
        "llm",
        "quantize",
        str(model),
        "--format",
        text,
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def by_layout(model: Path, target: Path, layout: str) -> None:
    """Write a checkpoint in a layout of the tests."""
    from sagellm.engines.testing.quantized import quantized_copy

    with TemporaryDirectory(dir=target.parent) as folder:
        quantized, _ = quantized_copy(model, Path(folder), layout)
        quantized.rename(target)


def as_gguf(model: Path, target: Path, kind: str) -> None:
    """Write a GGUF file; `Q4_K_M` as llama.cpp mixes types."""
    from sagellm.engines.loading.gguf_header import read_gguf_header
    from sagellm.engines.loading.gguf_types import BLOCKS
    from sagellm.engines.testing.gguf import Tensor, copy_as_gguf, write_gguf

    if kind != "Q4_K_M":
        copy_as_gguf(model, target, kind)  # type: ignore[arg-type]
        return
    copy_as_gguf(model, target, "Q4_0")
    header, random = read_gguf_header(target, with_vocabulary=True), np.random.default_rng(0)
    tensors: dict[str, Tensor] = {}
    for name, placed in header.tensors.items():
        if len(placed.shape) == 1:
            data = np.fromfile(target, np.uint8, placed.num_bytes, offset=placed.offset)
            tensors[name] = (placed.dtype, placed.shape, data)
            continue
        chosen = "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "token_embd")) else "Q4_K"
        size, num_bytes = BLOCKS[chosen]
        num_blocks = placed.shape[0] * placed.shape[1] // size
        blocks = random.integers(0, 256, (num_blocks, num_bytes), np.uint8)
        for at in K_TYPES[chosen]:
            blocks[:, at : at + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
        tensors[name] = (chosen, placed.shape, blocks.reshape(-1))
    entries = {
        name: [each.decode() if isinstance(each, bytes) else each for each in value]
        if isinstance(value, list)
        else value
        for name, value in header.entries.items()
    }
    write_gguf(target, entries, tensors)


def formats() -> dict[str, tuple[Callable[[Path, Path, str], None], str]]:
    """Return what writes a model in each format, by the name of the row."""
    return {
        **{name: (by_command, text) for name, text in QUANTIZED.items()},
        **{name: (by_layout, layout) for name, layout in LAYOUTS.items()},
        **{f"GGUF {kind}": (as_gguf, kind) for kind in (*GGUF, "Q4_K_M")},
    }


def row(name: str, path: Path) -> dict[str, Any]:
    """Measure a model in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    sizes: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    files = [path] if path.is_file() else path.glob("*.safetensors")
    sizes["stored_mib"] = sum(file.stat().st_size for file in files) / 2**20
    sizes["excess_mib"] = sizes["peak_mib"] - sizes["stored_mib"] - sizes["kv_mib"]
    return {"format": name, **{key: round(value, 1) for key, value in sizes.items()}}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--only", nargs="+", choices=["bf16", *formats()], metavar="FORMAT")
    parser.add_argument("--limit", type=float, default=LIMIT_MIB, help="MiB; default: %(default)s")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    output_flags(parser, "format-memory")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = ensure(folder / "bf16")
        rows = [row("bf16", model)] if "bf16" in (options.only or ["bf16"]) else []
        for name, (write, text) in formats().items():
            if options.only and name not in options.only:
                continue
            target = folder / (name.replace(" ", "-") + (".gguf" if write is as_gguf else ""))
            if not target.exists():
                write(model, target, text)
            rows.append(row(name, target))
            print(rows[-1], file=sys.stderr, flush=True)
            if not options.folder:
                target.unlink() if target.is_file() else shutil.rmtree(target)
    columns = ("stored_mib", "held_mib", "kv_mib", "loaded_mib", "peak_mib", "excess_mib")
    lines = [f"{'':20}" + "".join(f"{name.removesuffix('_mib'):>9}" for name in columns) + "  MiB"]
    lines += [f"{each['format']:20}" + "".join(f"{each[name]:9.0f}" for name in columns) for each in rows]
    publish("format-memory", "\n".join(lines), options, limit_mib=options.limit, rows=rows)
    over = [each["format"] for each in rows if each["excess_mib"] > options.limit]
    if over:
        raise SystemExit(f"more than {options.limit:.0f} MiB above stored bytes and KV: {', '.join(over)}")


if __name__ == "__main__":
    main()
