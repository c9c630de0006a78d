"""Most recently used first: an eviction policy for sageLLM from outside."""

__version__ = "1.0.0"
