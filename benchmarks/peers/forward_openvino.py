"""OpenVINO on CPUs, by the continuous batching of openvino_genai, prefix caching on; greedy.

Copies are optimum-intel's: weights as they are, in 8 bits (a scale and a zero point for each output), or in
4 bits (symmetric, groups of 128; embedding and head in 8). KV is in 8 bits and the rest in bf16 where the
CPU has it, as the plugin chooses; activations are rounded in groups where weights are. What it ran with is
kept with the figures. Needs openvino-genai, optimum-intel and nncf.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from forward_workload import Engine, run

_KV_GIB = 4
_EXPORT = {
    "bf16": ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"],
}
# Inputs whose activations share a scale, where more are faster than the plugin's 32 in prefill and decode.
_DYNAMIC_GROUP = {"int8": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 1024}}
_CHOSEN = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


class OpenVINO:
    """Drives `ContinuousBatchingPipeline` step by step."""

    def __init__(self, order: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _KV_GIB
        scheduler.max_num_seqs = 32
        scheduler.max_num_batched_tokens = 4096
        scheduler.enable_prefix_caching = True
        given = {"INFERENCE_NUM_THREADS": order["threads"], **_DYNAMIC_GROUP.get(order["format"], {})}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(order["model"], scheduler, "CPU", given)
        self._num_requests = 0
        core = openvino.Core()
        self.about = {
            "version": openvino.__version__,
            "genai": openvino_genai.__version__,
            "export": _EXPORT[order["format"]],
            **{name.lower(): str(given.get(name, core.get_property("CPU", name))) for name in _CHOSEN},
        }

    def rest(self) -> None:
        """Nothing: what it needs is allocated as it is made."""

    def one(self, prompt: list[int], num_output: int) -> list[float]:
        """Run a request alone."""
        started, times = time.perf_counter(), []
        handle = self._add(prompt, num_output)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - started
            while handle.can_read():
                times += [now for output in handle.read().values() for _ in output.generated_ids]
        return times

    def many(self, prompts: list[list[int]], num_output: int) -> int:
        """Run requests at once."""
        handles = [self._add(prompt, num_output) for prompt in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return sum(len(one.generated_ids) for handle in handles for one in handle.read_all())

    def _add(self, prompt: list[int], num_output: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_output, True, False
        self._num_requests += 1
        ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
        return self._pipeline.add_request(self._num_requests, ids, config)


def load(order: dict[str, Any]) -> Engine:
    """Load the engine."""
    return OpenVINO(order)


def write(model: Path, target: Path, number_format: str) -> None:
    """Export a checkpoint into a directory. Raises CalledProcessError if optimum-intel cannot."""
    export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
    task = ["--task", "text-generation-with-past"]
    subprocess.run([*export, *task, *_EXPORT[number_format], str(target)], check=True)


if __name__ == "__main__":
    run(load, write)
