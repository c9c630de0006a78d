"""No n-gram twice: a logits processor for sageLLM from outside."""

__version__ = "1.0.0"
