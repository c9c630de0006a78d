"""What this package offers."""

from sagellm.core import Provider, hookimpl


@hookimpl
def sagellm_providers() -> list[Provider]:
    """Name this package's implementations."""
    return [
        Provider("engine_adapter", name, f"sagellm.adapters.export.{target}", summary)
        for name, target, summary in (
            ("vllm", "vllm:VLLMAdapter", "vLLM, with our passes and eviction policies"),
            ("lmdeploy", "lmdeploy:LMDeployAdapter", "LMDeploy's server, settings alone"),
            ("tgi", "tgi:TGIAdapter", "Text Generation Inference, settings alone"),
        )
    ]
