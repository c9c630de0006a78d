"""vLLM for CPUs, offline, prefix caching on; int8 is W8A8, int4 W4A16 (compressed-tensors), kv8 FP8.

vLLM wants tcmalloc and Intel's OpenMP preloaded: set LD_PRELOAD where they are at hand.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from forward_workload import Engine, run

_GROUP = 128
_ROUND_TO = {"int8": 127, "int4": 7}
_KV_GIB = "4"


class VLLM:
    """Drives `LLMEngine` in this process."""

    def __init__(self, order: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _KV_GIB)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{order['threads'] - 1}")
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import torch
        import vllm

        model = Path(order["model"])
        weights, _, kv = order["format"].partition("-")
        if weights != "bf16":
            model = _quantized(model, Path(order["copies"]), weights)
        self._vllm = vllm
        self._llm = vllm.LLM(
            str(model),
            dtype="bfloat16",
            kv_cache_dtype="fp8" if kv else "auto",
            max_model_len=4096,
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )
        self._num_requests = 0
        self.about = {
            "version": vllm.__version__,
            "torch": torch.__version__,
            "preloaded": [Path(each).name for each in os.environ.get("LD_PRELOAD", "").split(":") if each],
        }

    def rest(self) -> None:
        """Nothing: what it needs is allocated as it is made."""

    def one(self, prompt: list[int], num_output: int) -> list[float]:
        """Run a request alone."""
        engine, times = self._llm.llm_engine, []
        params = self._params(num_output)
        self._num_requests += 1
        started = time.perf_counter()
        prompts = self._vllm.TokensPrompt(prompt_token_ids=prompt)
        engine.add_request(str(self._num_requests), prompts, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                now = time.perf_counter() - started
                times += [now] * (len(output.outputs[0].token_ids) - len(times))
        return times

    def many(self, prompts: list[list[int]], num_output: int) -> int:
        """Run requests at once."""
        given = [self._vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(given, self._params(num_output), use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in outputs)

    def _params(self, num_output: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False
        )


def _quantized(model: Path, copies: Path, number_format: str) -> Path:
    """Write a copy with rounded linear layers and the head in bf16, unless it is there."""
    target = copies / f"{model.name}-{number_format}-compressed-tensors"
    if (target / "config.json").exists():
        return target
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Any] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
        else:
            rounded = _by_channel if number_format == "int8" else _by_group
            tensors |= {name.removesuffix("weight") + part: one for part, one in rounded(weight).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _scheme(number_format)
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return target


def _by_channel(weight: Any) -> dict[str, Any]:
    import torch

    values = weight.float()
    scales = (values.abs().amax(1, keepdim=True) / _ROUND_TO["int8"]).bfloat16()
    rounded = (values / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": rounded, "weight_scale": scales}


def _by_group(weight: Any) -> dict[str, Any]:
    """Round to 4 bits; eight values, 8 added to each, are packed into an int32, the first one lowest."""
    import torch

    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // _GROUP, _GROUP)
    scales = (groups.abs().amax(2) / _ROUND_TO["int4"]).bfloat16()
    values = ((groups / scales.float()[..., None]).round().clamp(-8, 7) + 8).to(torch.int64)
    eights = values.view(rows, columns // 8, 8)
    packed = sum(eights[..., place] << (4 * place) for place in range(8))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return {
        "weight_packed": packed.contiguous(),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _scheme(number_format: str) -> dict[str, Any]:
    common = {"type": "int", "symmetric": True}
    if number_format == "int8":
        weights = {**common, "num_bits": 8, "strategy": "channel", "dynamic": False}
        activations = {**common, "num_bits": 8, "strategy": "token", "dynamic": True}
    else:
        weights = {**common, "num_bits": 4, "strategy": "group", "group_size": _GROUP, "dynamic": False}
        activations = None
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "int-quantized" if number_format == "int8" else "pack-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def load(order: dict[str, Any]) -> Engine:
    """Load the engine."""
    return VLLM(order)


if __name__ == "__main__":
    run(load)
