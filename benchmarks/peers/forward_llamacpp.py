"""llama.cpp by its Python bindings, a `llama_decode` for each step. Needs llama_cpp and numpy.

GCC 12 drops stores to the tile configuration of llama.cpp's AMX kernels, which then crash with quantized
weights. On a CPU with AMX, build with CMAKE_ARGS="-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'".
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from forward_workload import Engine, run

_BATCH = 2048
_CONTEXT = 2560
_F16 = 1
_FILE_TYPES = {"gguf-q8_0": 7, "gguf-q4_0": 2, "gguf-q4_k_m": 15}  # llama.h: MOSTLY_Q8_0 and so on


class LlamaCpp:
    """A model with one context for requests alone, and another for batches; greedy by the largest logit."""

    def __init__(self, order: dict[str, Any]) -> None:
        import llama_cpp

        self._lib, self._threads = llama_cpp, order["threads"]
        llama_cpp.llama_backend_init()
        path = Path(order["model"])
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._alone = self._context(_CONTEXT, 1)
        self._many: tuple[int, Any] = (0, None)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._known: list[int] = []
        self.about = {
            "version": llama_cpp.__version__,
            "file_mib": round(path.stat().st_size / 2**20),
            "system": llama_cpp.llama_print_system_info().decode(),
        }

    def rest(self) -> None:
        """Nothing: what it needs is allocated as it is made."""

    def one(self, prompt: list[int], num_output: int) -> list[float]:
        """Run a request alone, from the KV of the last prompt where both begin alike."""
        started = time.perf_counter()
        pairs = zip(self._known, prompt[:-1], strict=False)
        num_known = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._alone), 0, num_known, -1)
        last = len(prompt) - 1
        rows = [(prompt[n], n, 0, n == last) for n in range(num_known, len(prompt))]
        token = self._decode(self._alone, rows)[0]
        times = [time.perf_counter() - started]
        for position in range(len(prompt), len(prompt) + num_output - 1):
            token = self._decode(self._alone, [(token, position, 0, True)])[0]
            times.append(time.perf_counter() - started)
        self._known = prompt
        return times

    def many(self, prompts: list[list[int]], num_output: int) -> int:
        """Run requests of one length at once."""
        size, length = len(prompts), len(prompts[0])
        context = self._context_for(size, size * (length + num_output))
        rows = [
            (prompt[n], n, sequence, n == length - 1)
            for sequence, prompt in enumerate(prompts)
            for n in range(length)
        ]
        tokens = self._decode(context, rows)
        for position in range(length, length + num_output - 1):
            steps = [(tokens[sequence], position, sequence, True) for sequence in range(size)]
            tokens = self._decode(context, steps)
        return size * num_output

    def _context_for(self, size: int, num_tokens: int) -> Any:
        if self._many[0] != size:
            if self._many[1] is not None:
                self._lib.llama_free(self._many[1])
            self._many = (size, self._context(num_tokens + 256 * size, size))
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._many[1]), False)
        return self._many[1]

    def _context(self, num_tokens: int, num_sequences: int) -> Any:
        parameters = self._lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = num_tokens, num_sequences
        parameters.n_batch, parameters.n_ubatch = _BATCH, 512
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.type_k = parameters.type_v = _F16
        context = self._lib.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp gives no context of {num_tokens} tokens")
        return context

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute rows of (token, position, sequence, wants logits); return the next token by sequence."""
        import numpy

        found = {}
        batch = self._batch
        for start in range(0, len(rows), _BATCH):
            chunk = rows[start : start + _BATCH]
            batch.n_tokens = len(chunk)
            for n, (token, position, sequence, wants_logits) in enumerate(chunk):
                batch.token[n], batch.pos[n] = token, position
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
                batch.logits[n] = wants_logits
            if self._lib.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for n, (_, _, sequence, wants_logits) in enumerate(chunk):
                if wants_logits:
                    logits = self._lib.llama_get_logits_ith(context, n)
                    found[sequence] = int(numpy.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        return found


def load(order: dict[str, Any]) -> Engine:
    """Load the model."""
    return LlamaCpp(order)


def write(model: Path, target: Path, number_format: str) -> None:
    """Quantize a GGUF file. Raises RuntimeError if llama.cpp cannot."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = _FILE_TYPES[number_format]
    if llama_cpp.llama_model_quantize(str(model).encode(), str(target).encode(), parameters):
        raise RuntimeError(f"llama.cpp does not quantize {model}")


if __name__ == "__main__":
    run(load, write)
