"""No n-gram twice: a third-party logits processor for sageLLM."""

__version__ = "1.0.0"
