"""All that concerns GPUs: `hatch run cuda`, which keeps benchmarks/results/cuda-suite.json.

1. runs the kernels' tests in Triton's interpreter, on a CPU
2. compiles every kernel for sm_90
3. with a GPU: runs the same tests and those marked `cuda` on it, then `cuda_offline.py`

Without a GPU it says that the third part was not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, save

ROOT = Path(__file__).parent.parent

TESTS = [
    "accel/tests/cuda",
    *(f"integration-tests/test_cuda_{name}.py" for name in ("backend", "counts", "sampling")),
]
ANY_MARK = ["-m", "full or not full"]


def run(*command: str, is_interpreted: bool) -> subprocess.CompletedProcess[str]:
    """Run Python from the root, its output shown as it comes, and kept."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(is_interpreted))}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None, "a pipe"
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return subprocess.CompletedProcess(command, process.wait(), "".join(lines))


def tests(*arguments: str, is_interpreted: bool) -> dict[str, Any]:
    """Run tests and return their last line and whether all passed."""
    started = time.perf_counter()
    done = run("-m", "pytest", *arguments, is_interpreted=is_interpreted)
    summary = (done.stdout.strip().splitlines() or [""])[-1]
    return {"passed": done.returncode == 0, "summary": summary, "s": round(time.perf_counter() - started, 1)}


def compiled() -> dict[str, Any]:
    """Compile every kernel for sm_90."""
    done = run("accel/tests/cuda/compile_for_sm90.py", is_interpreted=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"passed": done.returncode == 0, "num_launches": len(lines), "kernels": lines}


def main() -> int:
    """Run every part that this machine can run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-benchmarks", action="store_true", help="only the tests")
    parser.add_argument(
        "--no-interpreter", action="store_true", help="not the first part: it is in the suite"
    )
    parser.add_argument("--save", type=Path, default=RESULTS / "cuda-suite.json", help="default: %(default)s")
    options = parser.parse_args()
    parts: dict[str, Any] = {}
    if not options.no_interpreter:
        parts["interpreter"] = tests(*ANY_MARK, *TESTS, is_interpreted=True)
    parts["compiled_for_sm90"] = compiled()
    if torch.cuda.is_available():
        parts["gpu"] = torch.cuda.get_device_name()
        parts["kernels_on_gpu"] = tests(*ANY_MARK, *TESTS, is_interpreted=False)
        parts["marked_cuda"] = tests("-m", "cuda", is_interpreted=False)
        if not options.no_benchmarks:
            parts["benchmarks"] = {
                "passed": not run("benchmarks/cuda_offline.py", is_interpreted=False).returncode
            }
    else:
        parts["gpu"] = "not run: torch finds no CUDA device"
    record = report_to(options.save, parts)
    print(record)
    return int(not all(part["passed"] for part in parts.values() if isinstance(part, dict)))


def report_to(path: Path, parts: dict[str, Any]) -> str:
    """Keep the result, and return what was and was not run."""
    import triton

    from sagellm.engines.machine import describe_machine

    record = {"benchmark": "cuda_suite", "triton": triton.__version__, **parts, "machine": describe_machine()}
    save(path, json.dumps(record, indent=1) + "\n")
    lines = [
        f"{name}: {part if isinstance(part, str) else 'passed' if part['passed'] else 'FAILED'}"
        for name, part in parts.items()
    ]
    return "\n".join([*lines, f"kept in {path}"])


if __name__ == "__main__":
    sys.exit(main())
