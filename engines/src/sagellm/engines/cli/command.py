"""Commands with many flags: help in groups, and hints for flags of vLLM that do not exist here."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from sagellm.engines.cli.flags import make_flag

_FIRST = ("Arguments", "Options")

_PARSER = "install the parser as a package, and name it: docs/providers/ has the smallest one"
_SPECULATION = (
    "write --speculation 'ngram{max_tokens=8,min_match=2}' for the method ngram with 8 "
    "num_speculative_tokens and a prompt_lookup_min of 2, or --speculation suffix; no model drafts"
)
_HINTS = {
    "--backend": "all servers with the OpenAI API are measured alike; leave it out, or see --endpoint",
    "--chat-template": "the tokenizer's own template is used; a chat_template.jinja beside it replaces it",
    "--cpu-offload-gb": "weights stay on the device; evicted KV goes to memory by --kv-tiers '{host: 4GiB}'",
    "--dataset-name": "prompts are made by --input-len and --output-len, or come from --trace FILE",
    "--dataset-path": "name a file of requests with --trace FILE",
    "--default-chat-template-kwargs": "a request gives `chat_template_kwargs`",
    "--disable-log-requests": "--no-access-log turns off the line per request",
    "--disable-log-stats": "statistics are shown only on request, at /metrics and by `sage llm cache stats`",
    "--disable-tqdm": "progress goes to standard error; 2>/dev/null hides it",
    "--distributed-executor-backend": "an engine runs on one device in one process; leave it out",
    "--download-dir": "set HF_HOME, or HF_HUB_CACHE, in the environment",
    "--enable-auto-tool-choice": "it is always on; leave it out",
    "--enable-chunked-prefill": "it is always on; --max-num-batched-tokens limits a step",
    "--enable-log-requests": "--log-level INFO logs how each request ended",
    "--enable-lora": "adapters are not supported; merge one into its checkpoint",
    "--enable-reasoning": "reasoning is split off by --reasoning-parser, which is auto; leave it out",
    "--enforce-eager": "write --forward-backend '{name: cuda, options: {graphs: false}}'",
    "--exclude-tools-when-tool-choice-none": "it is always so; leave it out",
    "--generation-config": "the checkpoint's generation_config.json is used; requests may say otherwise",
    "--guided-decoding-backend": "write --grammar-backend NAME",
    "--hf-token": "set HF_TOKEN in the environment",
    "--kv-transfer-config": "KV is kept on this machine or in Redis: --kv-tiers",
    "--load-format": "only safetensors are read; leave it out",
    "--lora-modules": "adapters are not supported; merge one into its checkpoint",
    "--max-logprobs": "a request may ask for at most 20; leave it out",
    "--num-gpu-blocks-override": "write --num-blocks",
    "--num-speculative-tokens": _SPECULATION,
    "--num-warmups": "write --warmup",
    "--override-generation-config": "requests state their sampling parameters",
    "--random-input-len": "write --input-len",
    "--random-output-len": "write --output-len",
    "--random-prefix-len": "write --prefix-share, the share of each prompt",
    "--result-filename": "write --save FILE",
    "--reasoning-parser-plugin": _PARSER,
    "--root-path": "a proxy in front of the server can rewrite paths",
    "--save-result": "write --save FILE",
    "--return-tokens-as-token-ids": "a request may ask for it: `return_tokens_as_token_ids`",
    "--scheduling-policy": "a request's `priority` is always respected; --scheduler-passes changes the rest",
    "--speculative-config": _SPECULATION,
    "--speculative-model": _SPECULATION,
    "--ssl-certfile": "a proxy in front of the server can terminate TLS",
    "--ssl-keyfile": "a proxy in front of the server can terminate TLS",
    "--structured-outputs-config": "write --grammar-backend 'NAME{…}', and --reasoning-parser NAME",
    "--swap-space": "evicted KV goes to memory with --kv-tiers '{host: 4GiB}'",
    "--task": "every model generates; leave it out",
    "--tokenizer-mode": "the fast tokenizer is used; leave it out",
    "--tool-parser-plugin": _PARSER,
    "--tool-server": "tools are called by the client; leave it out",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "--uvicorn-log-level": "write --log-level",
}
"""Flags of vLLM without an equivalent here → what to write instead. Flags with one exist here."""


class GroupedCommand(TyperCommand):
    """A command whose help lists options under the group that each one names (`rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, the command's own options, and then each group, in plain text."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in _FIRST}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                group = "Arguments" if is_argument else getattr(param, "rich_help_panel", None)
                groups.setdefault(group or "Options", []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; for a flag that only vLLM has, say what to write instead."""
        known = {spelling for param in self.params for spelling in (*param.opts, *param.secondary_opts)}
        for argument in args:
            name = argument.partition("=")[0].partition(".")[0]  # --speculative-config.method
            if name == "--":
                break
            if name in _HINTS and name not in known:
                ctx.fail(f"There is no {name} here: {_HINTS[name]}.")
        return super().parse_args(ctx, args)


def _only_one(param: typer.CallbackParam, value: int | None) -> None:
    if value not in (None, 1):
        raise typer.BadParameter(
            f"{value}; this version runs a model on one device: give 1 or leave {param.opts[0]} out; "
            "to use several devices, start an engine on each"
        )


PARALLEL_FLAGS = tuple(
    make_flag(
        name,
        int,
        typer.Option(
            f"--{name.replace('_', '-')}", short, hidden=True, callback=_only_one, expose_value=False
        ),
    )
    for name, short in (
        ("tensor_parallel_size", "-tp"),
        ("pipeline_parallel_size", "-pp"),
        ("data_parallel_size", "-dp"),
    )
)
"""Flags of vLLM that are accepted only with the value 1."""
