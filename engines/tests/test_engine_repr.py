"""What an engine says of itself: the model, where it runs, how much KV it has."""

from __future__ import annotations

from sagellm.engines import AsyncLLMEngine


def test_engines_say_what_they_run(make_engine):
    engine = make_engine(num_blocks=32, block_size=8, dtype="float32", device="cpu")
    told = f"<LLMEngine {engine.config.model.name}: float32 on cpu, 32 KV blocks of 8 tokens>"
    assert repr(engine) == told
    assert repr(AsyncLLMEngine(engine)) == f"<AsyncLLMEngine {told}>"
    engine.close()
    assert repr(engine) == f"{told[:-1]}, closed>"
