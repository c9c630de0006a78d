"""vLLM's command line, with our passes and eviction policies in it; its names are those of 0.32."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.adapters.export.flags import FP8, Flag, FlagAdapter
from sagellm.adapters.pass_settings import PassSettings
from sagellm.core import ConfigError, ProviderSpec
from sagellm.core.protocols.engine_adapter import EngineCommand
from sagellm.core.protocols.scheduler_ir import STAGES

SCHEDULER = "sagellm.adapters.vllm.AsyncScheduler"
CACHE_POLICIES = "sagellm.adapters.vllm.cache_policies"
STOCK_POLICIES = ("lru", "arc")

_PASSES = tuple(f"scheduler.{name}" for name in (*STAGES, "passes"))
_TARGET, _TIERS, _POLICY = "scheduler.step_target_ms", "kv.tiers", "prefix_cache.eviction_policy"


class VLLMAdapter(FlagAdapter):
    """Exports to `vllm serve`: settings as flags, passes and eviction policies as what it loads of ours."""

    flags = {  # noqa: RUF012  (typed in the base)
        "kv.block_size": Flag(
            "--block-size",
            check=lambda value: value % 16 == 0,
            possible="a multiple of 16, and of 32 on CPUs",
        ),
        "kv.dtype": Flag(
            "--kv-cache-dtype",
            lambda value: ("fp8",) if value == FP8 else (value,),
            lambda value: value in ("auto", FP8),
            "auto or fp8",
        ),
        "kv.num_blocks": Flag("--num-gpu-blocks-override"),
        "model.dtype": Flag("--dtype"),
        "model.max_model_len": Flag("--max-model-len"),
        "model.revision": Flag("--revision"),
        "prefix_cache.enabled": Flag("--enable-prefix-caching", lambda _: ()),
        "scheduler.max_num_batched_tokens": Flag("--max-num-batched-tokens"),
        "scheduler.max_num_seqs": Flag("--max-num-seqs"),
        "server.host": Flag("--host"),
        "server.port": Flag("--port"),
    }
    refused = {  # noqa: RUF012  (typed in the base)
        "kv.memory_fraction": "--gpu-memory-utilization is of all memory, weights included; set it there",
    }

    @property
    def engine(self) -> str:
        """vLLM."""
        return "vLLM 0.32"

    def knobs(self) -> Mapping[str, str]:
        """Return the flags, and where passes, tiers and eviction policies go."""
        return {
            **super().knobs(),
            **dict.fromkeys((*_PASSES, _TARGET), f"--scheduler-cls {SCHEDULER}, --additional-config"),
            _TIERS: "--kv-transfer-config (OffloadingConnector): host alone",
            _POLICY: "--kv-transfer-config: of what is offloaded, so with kv.tiers alone",
        }

    def command(self, model: str) -> tuple[str, ...]:
        """Return the server's command."""
        return ("vllm", "serve", model)

    def export(self, model: str, settings: Mapping[str, Any]) -> EngineCommand:
        """Return the command. Raises ConfigError for what vLLM has not."""
        flags = {
            key: value for key, value in settings.items() if key not in (*_PASSES, _TARGET, _TIERS, _POLICY)
        }
        arguments = super().export(model, flags).arguments
        if flags.get("prefix_cache.enabled") is False:
            off = "--no-enable-prefix-caching"
            arguments = tuple(off if each == "--enable-prefix-caching" else each for each in arguments)
        return EngineCommand(arguments=(*arguments, *_passes(settings), *_offloading(settings)))


def _passes(settings: Mapping[str, Any]) -> Sequence[str]:
    """Return what loads the scheduler with the passes that are named, if there are any."""
    named = {key.partition(".")[2]: settings[key] for key in _PASSES if settings.get(key)}
    target = settings.get(_TARGET)
    if not named:
        if target is not None:
            raise ConfigError(
                f"{_TARGET} is {target}; it needs a pass that reads it, such as scheduler.chunk"
            )
        return ()
    parts = [f"{stage}={ProviderSpec.of(named[stage]).text}" for stage in STAGES if stage in named]
    parts += [ProviderSpec.of(each).text for each in named.get("passes", ())]
    given: dict[str, Any] = {"passes": ",".join(parts)}
    if target is not None:
        given["step_target_ms"] = target
    PassSettings.of(given, "the passes")
    return ("--scheduler-cls", SCHEDULER, "--additional-config", json.dumps({"sagellm": given}))


def _offloading(settings: Mapping[str, Any]) -> Sequence[str]:
    """Return what has KV offloaded to the host's memory, if that is wanted."""
    tiers, policy = settings.get(_TIERS), settings.get(_POLICY)
    if not tiers:
        if policy is not None:
            raise ConfigError(
                f"{_POLICY} cannot be exported to vLLM 0.32 alone: its prefix cache on the device evicts the "
                "least recently used, and only what it offloads takes a policy; set kv.tiers, as in "
                "{host: 8GiB}"
            )
        return ()
    extra: dict[str, Any] = {"cpu_bytes_to_use": _host_bytes(tiers)}
    if policy is not None:
        text = ProviderSpec.of(policy).text
        ours = f"sagellm-eviction-policy:{text}" if text in STOCK_POLICIES else text
        extra |= {"eviction_policy": ours, "cache_policy_module_path": CACHE_POLICIES}
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return ("--kv-transfer-config", json.dumps(config))


def _host_bytes(tiers: Any) -> int:
    """Return the bytes of the tier `host`, which has to be the only one."""
    given = (
        tiers.items() if isinstance(tiers, Mapping) else [(each["name"], each["options"]) for each in tiers]
    )
    named = dict(given)
    size = named.get("host")
    size = size.get("max_bytes") if isinstance(size, Mapping) else size
    if len(named) != 1 or not isinstance(size, int):
        raise ConfigError(
            f"{_TIERS} is {tiers!r}; for vLLM 0.32 it must be one tier, host, with its size in bytes"
        )
    return size
