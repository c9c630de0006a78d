"""Write a GGUF copy of a checkpoint, for comparisons with llama.cpp from the same file.

    python benchmarks/gguf_file.py MODEL TARGET.gguf [--type Q8_0]

MODEL is the directory of a Llama, Mistral, Qwen2 or Qwen3 checkpoint, or `0.6b`: random weights of
Qwen3-0.6B's shape. Matrices are rounded as llama.cpp rounds them; needs nothing but sagellm-engines.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from sagellm.engines.testing import make_checkpoint, qwen3_0_6b_config
from sagellm.engines.testing.gguf import MatrixType, copy_as_gguf


def main(arguments: list[str] | None = None) -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a checkpoint's directory, or 0.6b")
    parser.add_argument("target", type=Path, help="the file to write")
    parser.add_argument("--type", dest="kind", choices=get_args(MatrixType), default="Q8_0")
    parser.add_argument("--pre", default="gpt-2", help="how the tokenizer divides words (tokenizer.ggml.pre)")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        model = Path(options.model)
        if options.model == "0.6b":
            model = make_checkpoint(Path(folder) / "model", dtype="bfloat16", **qwen3_0_6b_config())
        copy_as_gguf(model, options.target, options.kind, pre=options.pre)
    print(f"{options.target}: {options.target.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
