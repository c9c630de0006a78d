"""Looks for the examination in what was trained on: `python engines/embedded_model/overlap.py WORK_FOLDER`.

Decodes every training token and prints which questions share a run of six words with them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from corpus.mixture import examination_questions, word_runs
from rich.progress import track
from transformers import PreTrainedTokenizerFast

PART = 100_000  # tokens decoded at once
BORDER = 100  # tokens of which the parts share the last, so that no run is cut


def main() -> None:
    """Decode, compare, print JSON; exit code 1 if anything is shared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    ids = np.load(folder / "tokens.npy", mmap_mode="r")
    runs = {run: question for question in examination_questions() for run in word_runs(question)}
    shared: dict[str, str] = {}
    for start in track(range(0, len(ids), PART), "decoding"):
        text = tokenizer.decode(ids[start : start + PART + BORDER], skip_special_tokens=True)
        shared |= {runs[run]: " ".join(run) for run in word_runs(text) & runs.keys()}
    print(json.dumps({"tokens": len(ids), "runs": len(runs), "shared": shared}, indent=1))
    raise SystemExit(bool(shared))


if __name__ == "__main__":
    main()
