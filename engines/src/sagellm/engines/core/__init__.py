"""The engine's core: scheduling, KV, the model runner and the step loop."""
