"""The forward pass beside its peers', on this machine, one after the other.

python benchmarks/forward_peers.py MODEL --peer vllm=PYTHON --peer llamacpp=PYTHON --peer openvino=PYTHON

MODEL is a random-weight checkpoint of the Qwen3-0.6B shape; it is made if it is not there. Each engine runs
in a process of its own, from the environment of that interpreter (ours, and `--peer transformers` without
one, from this), and gets the same token ids:

    decode      prompt 128, output 128, one request: tokens/s between its first and last token
    decode_256  the same behind a prompt of 192, so that the context is 256 in the mean
    ttft_512, ttft_2048, ttft_cached: one prompt, its first token; the last with 1,920 of 2,048 tokens cached
    batch_16, batch_32: requests of 256 + 128 tokens at once, output tokens/s of the whole run

Peak memory is VmHWM of a process that was loaded and ran the prompt of 2,048 tokens alone; the start is the
time from the interpreter's start to the first token of a short prompt. Read bandwidth and matrix rate are
measured before and after each engine. Before each round ours gets the idle time that a server has between
requests, in which it allocates KV that was never used; the others allocate all of it as they start. The
result is kept in `benchmarks/results/forward-KIND-Ncore.json`.

`bf16 int8 int8-kv8 int4` of `--formats` are each engine's own way: our quantizers as they load, `int8-kv8`
with KV in 8 bits; for vLLM W8A8 and W4A16 (KV in FP8), for llama.cpp Q8_0 and Q4_0, for OpenVINO copies of
optimum-intel; transformers runs bf16 alone. The others are one file or directory that several engines read:
`w8a8 w4a8 w4a16` as `sagellm quantize` writes them, for vLLM too, and `gguf-q8_0 gguf-q4_0 gguf-q4_k_m` as
llama.cpp's own quantizer does; `-a8` behind them is ours with activations rounded to 8 bits, as llama.cpp
and OpenVINO round them. A measurement is not repeated once it has taken a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, foreign_cores, machine_line, save
from make_model import ensure

from sagellm.core import PluginRegistry
from sagellm.engines.machine import describe_machine
from sagellm.engines.testing.gguf import copy_as_gguf

_AS_IS = "MODEL"
_SAVED = {"w8a8": "w8a8", "w4a8": "w4a8", "w4a16": "int4"}
_GGUF = {name: name for name in ("gguf-q8_0", "gguf-q4_0", "gguf-q4_k_m")}
_ROUNDED = {f"{name}-a8": copy for name, copy in {**_GGUF, "w4a16": "int4"}.items()}
# The copy of the model that an engine reads, by format; of all but MODEL, `_copy` knows how it is written.
SUPPORTED: dict[str, dict[str, str]] = {
    "sagellm": {**dict.fromkeys(("bf16", "int8", "int8-kv8", "int4"), _AS_IS), **_SAVED, **_GGUF, **_ROUNDED},
    "vllm": {"bf16": _AS_IS, "int8": "w8a8", "int8-kv8": "w8a8", "int4": "int4", **_SAVED},
    "llamacpp": {"bf16": "gguf-bf16", "int8": "gguf-q8_0", "int4": "gguf-q4_0", **_GGUF},
    "openvino": {name: f"openvino-{name}" for name in ("bf16", "int8", "int4")},
    "transformers": {"bf16": _AS_IS},
}
FORMATS = tuple(SUPPORTED["sagellm"])
_RUNNERS = Path(__file__).parent / "peers"
_KINDS = {"amx_bf16": "amx", "avx512_bf16": "avx512", "avx2": "avx2"}


def main() -> None:
    """Run every engine in every format, and keep what was measured."""
    options = _options()
    model = ensure(options.model)
    machine = describe_machine()
    kind = next((name for flag, name in _KINDS.items() if flag in machine["flags"]), "other")
    path = options.save or RESULTS / f"forward-{kind}-{machine['cpus']}core.json"
    result: dict[str, Any] = {
        "benchmark": "forward_peers",
        "command": "forward_peers.py MODEL" + "".join(f" --peer {name}=PYTHON" for name, _ in options.peer),
        "kind": kind,
        "foreign_cores": foreign_cores(),
        "runs": [],
    }
    if options.add and path.exists():
        result["runs"] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    quantizers = _missing_quantizers()
    engines = {"sagellm": sys.executable, **dict(options.peer)}
    for name, python in engines.items():
        if options.only and name not in options.only:
            continue
        for number_format in (one for one in options.formats if one in SUPPORTED[name]):
            if name == "sagellm" and number_format in quantizers:
                continue
            copy = _copy(SUPPORTED[name][number_format], model, options.copies or model.parent, engines)
            run = _measure(name, python, copy, number_format, options)
            result["runs"] = [one for one in result["runs"] if not _is_same(one, run)] + [run]
            save(path, json.dumps({**result, "machine": machine}, indent=1) + "\n")
            print(_line(run), flush=True)
    print(f"\n{machine_line()}; kept in {path}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", action="append", type=_peer, default=[], metavar="NAME[=PYTHON]")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--only", nargs="+", choices=list(SUPPORTED), help="leave the other engines out")
    parser.add_argument("--add", action="store_true", help="keep the other runs of the file that exists")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--phases", nargs="+", default=None, help="some of the measurements alone")
    parser.add_argument("--copies", type=Path, help="where peers' copies of the model go; default: beside it")
    parser.add_argument("--save", type=Path)
    return parser.parse_args()


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in SUPPORTED or name == "sagellm":
        peers = ", ".join(one for one in SUPPORTED if one != "sagellm")
        raise argparse.ArgumentTypeError(f"{text!r} is not a peer; there are {peers}")
    return name, python or sys.executable


def _missing_quantizers() -> set[str]:
    """Return our formats whose quantizer is not installed."""
    installed = {entry.provider.name for entry in PluginRegistry.load().providers("quantizer")}
    return {one for one in ("int8", "int8-kv8", "int4") if one.partition("-")[0] not in installed}


def _copy(copy: str, model: Path, copies: Path, engines: dict[str, str]) -> Path:
    """Return a copy of the model, written unless it is there."""
    if copy == _AS_IS:
        return model
    kind, _, number_format = copy.partition("-")
    copies.mkdir(parents=True, exist_ok=True)
    target = copies / f"{model.name}-{copy}{'.gguf' if kind == 'gguf' else ''}"
    if target.exists():
        return target
    partial = target.with_name(f"partial-{target.name}")  # an interrupted one is written again
    if copy == "gguf-bf16":
        copy_as_gguf(model, partial, "BF16")
    elif kind == "gguf":
        plain = _copy("gguf-bf16", model, copies, engines)
        _write("llamacpp", engines, {"model": str(plain), "target": str(partial), "format": copy})
    elif kind == "openvino":
        _write(kind, engines, {"model": str(model), "target": str(partial), "format": number_format})
    else:
        quantize = "from sagellm.engines.cli import main_llm; main_llm()"
        arguments = ["quantize", str(model), "--format", copy, "--output", str(partial)]
        subprocess.run([sys.executable, "-c", quantize, *arguments], check=True)
    partial.rename(target)
    return target


def _write(name: str, engines: dict[str, str], order: dict[str, Any]) -> None:
    """Let a peer write a copy in its own environment."""
    if name not in engines:
        sys.exit(f"{order['format']} is written by {name}; add --peer {name}=PYTHON")
    _run(engines[name], f"forward_{name}.py", {**order, "threads": os.cpu_count()})


def _measure(
    name: str, python: str, model: Path, number_format: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one engine in a process of its own, between two measurements of the machine."""
    before = _limits(options.threads)
    order = {
        "model": str(model.resolve()),
        "format": number_format,
        "threads": options.threads,
        "rounds": options.rounds,
        "phases": options.phases,
    }
    figures = _run(python, f"forward_{name}.py", order)
    peak = _run(python, f"forward_{name}.py", {**order, "rounds": 1, "phases": ["memory"]})
    figures["figures"]["peak_rss_mib"] = peak["figures"]["peak_rss_mib"]
    return {"engine": name, "format": number_format, **figures, "limits": [before, _limits(options.threads)]}


def _run(python: str, script: str, order: dict[str, Any]) -> dict[str, Any]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(order["threads"]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        done = subprocess.run(
            [python, "-W", "ignore", str(_RUNNERS / script), json.dumps(order)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
        )
        if done.returncode:
            log.seek(0)
            sys.exit(f"{script} ended with {done.returncode}:\n{log.read()[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.stdout else {}


def _limits(threads: int) -> dict[str, float | str]:
    """Measure read bandwidth and matrix rates, in a process that gives its memory back."""
    source = (
        "import dataclasses, json, torch\n"
        "from sagellm.engines.metrics.limits import measure_limits\n"
        f"torch.set_num_threads({threads})\n"
        "print(json.dumps({name: dataclasses.asdict(measure_limits('cpu', dtype))"
        " for name, dtype in (('bf16', 'bfloat16'), ('int8', 'int8'))}))"
    )
    done = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "read_gbytes_per_s": max(one["read_bandwidth_bytes_per_s"] for one in found.values()) / 1e9,
        "bf16_tflops_per_s": found["bf16"]["peak_flops_per_s"] / 1e12,
        "int8_tops_per_s": found["int8"]["peak_flops_per_s"] / 1e12,
        "gemm_tflops_per_s": max(one["gemm_flops_per_s"] for one in found.values()) / 1e12,
        "bandwidth_source": found["bf16"]["bandwidth_source"],
        "peak_source": found["bf16"]["peak_source"],
    }


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["engine"] == other["engine"] and one["format"] == other["format"])


def _line(run: dict[str, Any]) -> str:
    figures = run["figures"]
    shown = (
        f"{name} {value['median']:.4g}" if isinstance(value, dict) else f"{name} {value:.4g}"
        for name, value in figures.items()
    )
    return f"{run['engine']} {run['format']}: " + ", ".join(shown)


if __name__ == "__main__":
    main()
