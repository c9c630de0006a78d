"""What this package offers: the engine, the model families and the torch backends."""

from sagellm.core import Provider, hookimpl

_PACKAGE = "sagellm.engines"


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider("engine", "llm", f"{_PACKAGE}.llm_engine:LLMEngine", "one model in this process"),
        Provider("model_family", "qwen3", f"{_PACKAGE}.models:Qwen3Family", "Qwen3"),
        Provider("model_family", "qwen2", f"{_PACKAGE}.models:Qwen2Family", "Qwen2 and Qwen2.5"),
        Provider("model_family", "llama", f"{_PACKAGE}.models:LlamaFamily", "Llama 3.x"),
        Provider("model_family", "mistral", f"{_PACKAGE}.models:MistralFamily", "Mistral, sliding window"),
    ]
