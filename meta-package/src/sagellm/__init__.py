"""sageLLM under one name: `from sagellm import LLM, SamplingParams`, as in vLLM."""

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sagellm.engines import (
        LLM as LLM,
        AsyncLLMEngine as AsyncLLMEngine,
        BeamSearchParams as BeamSearchParams,
        CompletionOutput as CompletionOutput,
        EngineConfig as EngineConfig,
        LLMEngine as LLMEngine,
        RequestOutput as RequestOutput,
        SamplingParams as SamplingParams,
        TextPrompt as TextPrompt,
        TokensPrompt as TokensPrompt,
        __version__ as __version__,
    )

# The other distributions have no such file: their folders, wherever they are, stay parts of this package, in
# the order of sys.path.
__path__ = extend_path([], __name__)

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("sagellm.engines"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; sagellm.engines may have it")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
