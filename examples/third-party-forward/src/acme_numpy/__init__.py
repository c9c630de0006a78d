"""Decoders in numpy: a third-party forward backend for sageLLM."""

__version__ = "1.0.0"
