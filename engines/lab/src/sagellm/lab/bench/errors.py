"""What stops a benchmark before it has figures.

SageLLMError
└── BenchmarkError (RuntimeError)   no server, a refused key, a warm-up or all requests failed
"""

from __future__ import annotations

from sagellm.core import SageLLMError


class BenchmarkError(SageLLMError, RuntimeError):
    """A benchmark has no figures to show; the message says what to change."""
