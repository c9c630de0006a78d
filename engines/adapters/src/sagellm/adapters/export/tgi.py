"""The command line of Text Generation Inference; its names are those of 3.0."""

from __future__ import annotations

from sagellm.adapters.export.flags import FP8, Flag, FlagAdapter

_OWN_ORDER = "its router serves in order of arrival and takes no passes; leave the setting out"


class TGIAdapter(FlagAdapter):
    """Exports to `text-generation-launcher`."""

    flags = {  # noqa: RUF012  (typed in the base)
        "kv.dtype": Flag(
            "--kv-cache-dtype",
            lambda _: ("fp8_e4m3fn",),
            lambda value: value == FP8,
            "fp8; without the setting it is the model's",
        ),
        "model.dtype": Flag(
            "--dtype", check=lambda value: value in ("float16", "bfloat16"), possible="float16 or bfloat16"
        ),
        "model.max_model_len": Flag("--max-total-tokens"),
        "model.revision": Flag("--revision"),
        "scheduler.max_num_batched_tokens": Flag("--max-batch-prefill-tokens"),  # prompts alone
        "scheduler.max_num_seqs": Flag("--max-batch-size"),
        "server.host": Flag("--hostname"),
        "server.port": Flag("--port"),
    }
    refused = {  # noqa: RUF012  (typed in the base)
        "kv.block_size": "its attention backend chooses the size of blocks; leave the setting out",
        "kv.memory_fraction": "--cuda-memory-fraction is of all memory, weights included; set it there",
        "kv.num_blocks": "it counts tokens and finds their number itself; see --max-batch-total-tokens",
        "kv.tiers": "it keeps KV on the device alone; leave the setting out",
        "prefix_cache.enabled": "its launcher decides by the attention backend; leave the setting out",
        "prefix_cache.eviction_policy": "it evicts the least recently used and takes no policy; leave it out",
        **{f"scheduler.{name}": _OWN_ORDER for name in ("order", "share", "preempt", "chunk", "passes")},
        "scheduler.step_target_ms": _OWN_ORDER,
    }

    @property
    def engine(self) -> str:
        """Text Generation Inference."""
        return "TGI 3.0"

    def command(self, model: str) -> tuple[str, ...]:
        """Return the launcher's command."""
        return ("text-generation-launcher", "--model-id", model)
