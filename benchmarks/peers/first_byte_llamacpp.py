"""llama.cpp by its Python bindings: loads a GGUF copy of a checkpoint, draws a token, and prints a byte.

`python first_byte_llamacpp.py MODEL [--prepare]`; with `--prepare` it makes the copy, beside the checkpoint.
The copy has no tokenizer, so the prompt is token ids, and the byte stands for the token's text.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forward_llamacpp import LlamaCpp, gguf_file

_PROMPT = list(range(3, 15))  # as many tokens as the question of our command has with its template


def main() -> None:
    """Answer, or make the copy."""
    model = Path(sys.argv[1])
    if sys.argv[2:] == ["--prepare"]:
        gguf_file(model, model.parent, "bf16")
        return
    order = {"model": str(model), "copies": str(model.parent), "format": "bf16", "threads": os.cpu_count()}
    LlamaCpp(order).one(_PROMPT, 1)
    os.write(1, b".")


if __name__ == "__main__":
    main()
