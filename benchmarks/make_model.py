"""Write a random-weight checkpoint of the Qwen3-0.6B shape: `python benchmarks/make_model.py DIRECTORY`."""

from __future__ import annotations

import argparse
from pathlib import Path

from sagellm.engines.testing import make_checkpoint, qwen3_0_6b_config


def ensure(path: Path, *, sharpness: float = 1.0) -> Path:
    """Make the checkpoint unless it is there already."""
    if not (path / "config.json").exists():
        make_checkpoint(
            path, family="qwen3", seed=0, dtype="bfloat16", sharpness=sharpness, **qwen3_0_6b_config()
        )
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    print(ensure(parser.parse_args().directory))
