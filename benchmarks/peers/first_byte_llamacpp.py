"""llama.cpp by its Python bindings: loads a GGUF file, draws a token, and prints a byte.

`python first_byte_llamacpp.py FILE`. The prompt is token ids, and the byte stands for the token's text.
"""

from __future__ import annotations

import os
import sys

from forward_llamacpp import LlamaCpp

_PROMPT = list(range(3, 15))  # as many tokens as the question of our command has with its template

if __name__ == "__main__":
    LlamaCpp({"model": sys.argv[1], "threads": os.cpu_count()}).one(_PROMPT, 1)
    os.write(1, b".")
