"""LMDeploy's command line; its names are those of 0.7."""

from __future__ import annotations

from sagellm.adapters.export.flags import Flag, FlagAdapter, switch

_OWN_ORDER = "its scheduler serves in order of arrival and takes no passes; leave the setting out"


class LMDeployAdapter(FlagAdapter):
    """Exports to `lmdeploy serve api_server`, for both of its backends."""

    flags = {  # noqa: RUF012  (typed in the base)
        "kv.block_size": Flag(
            "--cache-block-seq-len",
            check=lambda value: value % 32 == 0,
            possible="a multiple of 32, and of 64 on GPUs older than compute capability 8.0",
        ),
        "kv.dtype": Flag(
            "--quant-policy",
            lambda value: ("8" if value == "int8" else "0",),
            lambda value: value in ("auto", "int8"),
            "auto or int8",
        ),
        "kv.memory_fraction": Flag("--cache-max-entry-count"),  # of free memory, as ours
        "model.dtype": Flag(
            "--dtype", check=lambda value: value != "float32", possible="auto, float16 or bfloat16"
        ),
        "model.max_model_len": Flag("--session-len"),
        "model.revision": Flag("--revision"),
        "prefix_cache.enabled": switch("--enable-prefix-caching"),
        "scheduler.max_num_batched_tokens": Flag("--max-prefill-token-num"),  # prompts alone
        "scheduler.max_num_seqs": Flag("--max-batch-size"),
        "server.host": Flag("--server-name"),
        "server.port": Flag("--server-port"),
    }
    refused = {  # noqa: RUF012  (typed in the base)
        "kv.num_blocks": "it counts KV as a share of free memory; set kv.memory_fraction",
        "kv.tiers": "it keeps KV on the device alone; leave the setting out",
        "prefix_cache.eviction_policy": "it evicts the least recently used and takes no policy; leave it out",
        **{f"scheduler.{name}": _OWN_ORDER for name in ("order", "share", "preempt", "chunk", "passes")},
        "scheduler.step_target_ms": _OWN_ORDER,
    }

    @property
    def engine(self) -> str:
        """LMDeploy."""
        return "LMDeploy 0.7"

    def command(self, model: str) -> tuple[str, ...]:
        """Return the server's command."""
        return ("lmdeploy", "serve", "api_server", model)
