"""The sageLLM engine: assembles the packages and runs the forward pass."""

from typing import TYPE_CHECKING

from sagellm.core import lazy

if TYPE_CHECKING:
    from sagellm.engines.async_engine import AsyncLLMEngine as AsyncLLMEngine
    from sagellm.engines.beam_search import (
        BeamSearchOutput as BeamSearchOutput,
        BeamSearchParams as BeamSearchParams,
        BeamSearchSequence as BeamSearchSequence,
    )
    from sagellm.engines.config.schema import EngineConfig as EngineConfig
    from sagellm.engines.engine_client import EngineClient as EngineClient, InProcessClient as InProcessClient
    from sagellm.engines.llm_engine import LLM as LLM, LLMEngine as LLMEngine
    from sagellm.engines.logprobs import Logprob as Logprob
    from sagellm.engines.requests.input_processor import InputProcessor as InputProcessor
    from sagellm.engines.requests.output_stream import OutputStream as OutputStream
    from sagellm.engines.requests.outputs import (
        CompletionOutput as CompletionOutput,
        RequestMetrics as RequestMetrics,
        RequestOutput as RequestOutput,
    )
    from sagellm.engines.requests.prompts import TextPrompt as TextPrompt, TokensPrompt as TokensPrompt
    from sagellm.engines.sampling.params import SamplingParams as SamplingParams
    from sagellm.engines.sampling.rows import (
        BadLogitsError as BadLogitsError,
        SampledToken as SampledToken,
        SamplingRow as SamplingRow,
    )
    from sagellm.engines.sampling.sampler import Sampler as Sampler

__version__ = "0.2.0"

_MODULE_OF = {
    "AsyncLLMEngine": ".async_engine",
    "BadLogitsError": ".sampling.rows",
    "BeamSearchOutput": ".beam_search",
    "BeamSearchParams": ".beam_search",
    "BeamSearchSequence": ".beam_search",
    "CompletionOutput": ".requests.outputs",
    "EngineClient": ".engine_client",
    "EngineConfig": ".config.schema",
    "InProcessClient": ".engine_client",
    "InputProcessor": ".requests.input_processor",
    "LLM": ".llm_engine",
    "LLMEngine": ".llm_engine",
    "Logprob": ".logprobs",
    "OutputStream": ".requests.output_stream",
    "RequestMetrics": ".requests.outputs",
    "RequestOutput": ".requests.outputs",
    "SampledToken": ".sampling.rows",
    "Sampler": ".sampling.sampler",
    "SamplingParams": ".sampling.params",
    "SamplingRow": ".sampling.rows",
    "TextPrompt": ".requests.prompts",
    "TokensPrompt": ".requests.prompts",
}

__all__ = sorted(["__version__", *_MODULE_OF])

__getattr__ = lazy(__name__, _MODULE_OF)
