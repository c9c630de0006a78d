"""Ten lines of generation: `python examples/generate.py MODEL` (a directory or a hub id)."""

import sys
import tempfile

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

model = sys.argv[1] if len(sys.argv) > 1 else make_checkpoint(tempfile.mkdtemp(), family="qwen3")
engine = LLMEngine(model=model, num_blocks=256)
params = SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=24)
for output in engine.generate(["A KV cache keeps", "The scheduler"], params):
    print(f"{output.prompt!r} → {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
