"""Generation on a GPU beside its byte limit: `python benchmarks/cuda_offline.py [--peer NAME=PYTHON]`.

Random weights of the shapes of Qwen3-0.6B and Qwen2.5-0.5B, in bfloat16:

- alone: one request, prompt 256, output 256
- batch: 32 requests of the same size
- offline: nano-vllm's 256 requests, prompts and outputs of 100 to 1,024 tokens, temperature 0.6

The byte limit is what the decodes of a load must read, the weights once per step and the KV of all its
sequences, at the rate of copies measured in the same run, with all requests running from the start.

A peer generates the same in its own interpreter. Without a GPU nothing is measured; `--dry-run` runs a tiny
model on the CPU and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30
MAX_MODEL_LEN = 4096


class Load(NamedTuple):
    """Requests that are submitted together."""

    name: str
    prompts: list[list[int]]
    num_outputs: list[int]
    temperature: float


def loads(*, is_tiny: bool) -> list[Load]:
    """Return the loads; tiny ones take a CPU seconds."""
    scale = 32 if is_tiny else 1
    random = Random(0)

    def ids(number: int) -> list[int]:
        return [random.randrange(500 if is_tiny else 10_000) for _ in range(number)]

    size = 256 // scale
    alone = Load("alone", [ids(size)], [size], 0.0)
    batch = Load("batch", [ids(size) for _ in range(32 // (8 if is_tiny else 1))], [], 0.0)
    batch = batch._replace(num_outputs=[size] * len(batch.prompts))
    number = 256 // (32 if is_tiny else 1)
    prompts = [ids(random.randint(100 // scale, 1024 // scale)) for _ in range(number)]
    outputs = [random.randint(100 // scale, 1024 // scale) for _ in range(number)]
    return [alone, batch, Load("offline", prompts, outputs, 0.6)]


def bound_s(load: Load, weight_bytes: int, kv_token_bytes: int, bandwidth: float) -> float:
    """Return the time in which a device reads what the decodes of a load must read."""
    num_steps = max(load.num_outputs)
    contexts = sum(
        len(prompt) * outputs + outputs * (outputs + 1) // 2
        for prompt, outputs in zip(load.prompts, load.num_outputs, strict=True)
    )
    return (num_steps * weight_bytes + contexts * kv_token_bytes) / bandwidth


class SageLLM:
    """Our own engine."""

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        from sagellm.engines import EngineConfig, LLMEngine

        self.engine = LLMEngine(
            EngineConfig(model={"name": path, "max_model_len": MAX_MODEL_LEN}, **settings)
        )

    def generate(self, load: Load) -> list[list[int]]:
        from sagellm.engines import SamplingParams

        params = [
            SamplingParams(temperature=load.temperature, max_tokens=number, ignore_eos=True, seed=0)
            for number in load.num_outputs
        ]
        return [list(each.outputs[0].token_ids) for each in self.engine.generate(load.prompts, params)]


class VLLM:
    """vLLM, in its own interpreter."""

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.engine = LLM(
            path, max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=False, enable_prefix_caching=False
        )

    def generate(self, load: Load) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=load.temperature, max_tokens=number, ignore_eos=True, detokenize=False)
            for number in load.num_outputs
        ]
        prompts = [{"prompt_token_ids": each} for each in load.prompts]
        outputs = self.engine.generate(prompts, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in outputs]


ENGINES = {"sagellm": SageLLM, "vllm": VLLM}


class Utilisation:
    """NVML's GPU utilisation, sampled ten times a second; None where it cannot be read."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Utilisation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def mean(self) -> float | None:
        return round(sum(self._values) / len(self._values), 1) if self._values else None

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # no NVML, no driver
            return
        while not self._is_over.wait(0.1):
            self._values.append(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)


def measure(engine: Any, load: Load, num_runs: int) -> dict[str, Any]:
    """Run a load once to warm up, then several times."""
    engine.generate(load)
    first = load._replace(num_outputs=[1] * len(load.prompts))
    times, firsts = [], []
    with Utilisation() as used:
        for _ in range(num_runs):
            started = time.perf_counter()
            engine.generate(first)
            firsts.append(time.perf_counter() - started)
            started = time.perf_counter()
            outputs = engine.generate(load)
            times.append(time.perf_counter() - started)
    num_tokens = sum(map(len, outputs))
    assert num_tokens == sum(load.num_outputs), "every request generates all its tokens"
    best, ttft = min(times), min(firsts)
    return {
        "load": load.name,
        "num_output_tokens": num_tokens,
        "s": [round(each, 4) for each in times],
        "tokens_per_s": round(num_tokens / best, 1),
        "ttft_ms": round(1000 * ttft, 2),
        "tpot_ms": round(1000 * (best - ttft) / max(1, max(load.num_outputs) - 1), 3),
        "gpu_utilisation": used.mean,
    }


def copy_bandwidth() -> float:
    """Return bytes read and written per second by the best of 20 copies of 2 GiB on the device."""
    import torch

    source = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return 2 * source.nbytes / best


def shapes(*, is_tiny: bool) -> dict[str, dict[str, Any]]:
    """Return arguments of `make_checkpoint` by name."""
    from sagellm.engines.testing import qwen3_0_6b_config

    if is_tiny:
        return {"tiny": {"family": "qwen3", "dtype": "bfloat16"}}
    qwen2_5 = {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }
    return {
        "qwen3-0.6b": {"family": "qwen3", "dtype": "bfloat16", **qwen3_0_6b_config()},
        "qwen2.5-0.5b": {"family": "qwen2", "dtype": "bfloat16", **qwen2_5},
    }


def run_here(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one engine on one checkpoint in this process."""
    engine = ENGINES[options.engine](options.model, json.loads(options.settings))
    return [measure(engine, load, options.num_runs) for load in loads(is_tiny=options.dry_run)]


def run_elsewhere(python: str, name: str, model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure an engine in a process of its own, so that each finds the device's memory free."""
    command = [python, __file__, "--engine", name, "--model", str(model), "--num-runs", str(options.num_runs)]
    command += ["--settings", options.settings] + (["--dry-run"] if options.dry_run else [])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--peer", action="append", default=[], help="NAME=PYTHON, as in vllm=/opt/vllm/bin/python"
    )
    parser.add_argument("--num-runs", type=int, default=3)
    parser.add_argument("--settings", default='{"forward": {"backend": "cuda", "executor": "overlapped"}}')
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU; measures nothing")
    parser.add_argument(
        "--save", type=Path, default=RESULTS / "cuda-offline.json", help="default: %(default)s"
    )
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure every engine on every shape, and keep the figures."""
    options = parse()
    if options.dry_run:
        options.settings = "{}"
    if options.engine is not None:
        print(json.dumps(run_here(options)))
        return 0
    import torch

    from sagellm.engines.testing import make_checkpoint

    if not options.dry_run and not torch.cuda.is_available():
        print("not run: torch finds no CUDA device, so nothing was measured")
        return 1
    pythons = {"sagellm": sys.executable, **dict(each.split("=", 1) for each in options.peer)}
    bandwidth = 1e9 if options.dry_run else copy_bandwidth()
    figures = []
    for shape, settings in shapes(is_tiny=options.dry_run).items():
        with tempfile.TemporaryDirectory() as folder:
            path = make_checkpoint(Path(folder) / shape, **settings)
            limits = limits_of(path, bandwidth, is_tiny=options.dry_run)
            for name, python in pythons.items():
                for figure in run_elsewhere(python, name, path, options):
                    time_s = min(figure["s"])
                    share = round(limits[figure["load"]] / time_s, 3)
                    figures.append({"model": shape, "engine": name, **figure, "share_of_byte_limit": share})
                    print(json.dumps(figures[-1]), flush=True)
    if not options.dry_run:
        keep(options.save, figures, bandwidth)
    return 0


def limits_of(path: Path, bandwidth: float, *, is_tiny: bool) -> dict[str, float]:
    """Return the least time of each load."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    weight_bytes = sum(each.stat().st_size for each in path.glob("*.safetensors"))
    return {
        each.name: bound_s(each, weight_bytes, kv_token_bytes, bandwidth) for each in loads(is_tiny=is_tiny)
    }


def keep(path: Path, figures: list[dict[str, Any]], bandwidth: float) -> None:
    """Write the figures with the device and the machine."""
    import torch
    from common import save

    from sagellm.engines.machine import describe_machine

    record = {
        "benchmark": "cuda_offline",
        "gpu": torch.cuda.get_device_name(),
        "copy_gbytes_per_s": round(bandwidth / 1e9, 1),
        "figures": figures,
        "machine": describe_machine(),
    }
    save(path, json.dumps(record, indent=1) + "\n")
    print(f"kept in {path}")


if __name__ == "__main__":
    sys.exit(main())
