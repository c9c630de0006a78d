"""Commands with many flags: help in groups, and a word for those who know another program's flags."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from sagellm.engines.cli.flags import make_flag

_FIRST = ("Arguments", "Options")

_HINTS = {
    "--backend": "any server with the OpenAI API is measured alike; leave it out, or see --endpoint",
    "--chat-template": "the template is the tokenizer's own; chat_template.jinja beside it changes it",
    "--cpu-offload-gb": "weights stay on the device; evicted KV goes to memory by --kv-tiers '{host: 4GiB}'",
    "--dataset-name": "prompts are made by --input-len and --output-len, or come from --trace FILE",
    "--dataset-path": "name a file of requests with --trace FILE",
    "--disable-log-requests": "the lines of requests are turned off with --no-access-log",
    "--disable-log-stats": "statistics are shown when asked for, at /metrics and by `sage llm cache stats`",
    "--disable-tqdm": "there is a bar on a terminal alone; 2>/dev/null hides all of it",
    "--distributed-executor-backend": "an engine runs on one device in one process; leave it out",
    "--download-dir": "set HF_HOME, or HF_HUB_CACHE, in the environment",
    "--enable-chunked-prefill": "it is always on; --max-num-batched-tokens limits a step",
    "--enable-log-requests": "--log-level INFO logs how each request ended",
    "--enforce-eager": "it always is so; leave it out",
    "--generation-config": "the checkpoint's generation_config.json is used; requests may say otherwise",
    "--guided-decoding-backend": "structured output is not supported",
    "--hf-token": "set HF_TOKEN in the environment",
    "--kv-cache-dtype": "KV has the model's --dtype",
    "--load-format": "only safetensors are read; leave it out",
    "--max-logprobs": "20 are the most that a request may ask for; leave it out",
    "--num-gpu-blocks-override": "write --num-blocks",
    "--num-warmups": "write --warmup",
    "--random-input-len": "write --input-len",
    "--random-output-len": "write --output-len",
    "--random-prefix-len": "write --prefix-share, the share of each prompt",
    "--result-filename": "write --save FILE",
    "--root-path": "a proxy in front of the server can rewrite paths",
    "--save-result": "write --save FILE",
    "--scheduling-policy": "requests with `priority` run by it; --scheduler-passes changes the rest",
    "--ssl-certfile": "TLS ends in a proxy in front of the server",
    "--ssl-keyfile": "TLS ends in a proxy in front of the server",
    "--swap-space": "evicted KV goes to memory with --kv-tiers '{host: 4GiB}'",
    "--task": "every model generates; leave it out",
    "--tokenizer-mode": "the fast tokenizer is used; leave it out",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
    "--uvicorn-log-level": "write --log-level",
}
"""Flags of vLLM that have no equal here → what to write instead. Those that have are flags of ours."""


class GroupedCommand(TyperCommand):
    """A command whose options stand in the help under the group that each one names (`rich_help_panel`)."""

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
        """Parse, and tell what to write instead of a flag that vLLM has and we have not."""
        known = {spelling for param in self.params for spelling in (*param.opts, *param.secondary_opts)}
        for argument in args:
            name = argument.partition("=")[0]
            if name == "--":
                break
            if name in _HINTS and name not in known:
                ctx.fail(f"There is no {name} here: {_HINTS[name]}.")
        return super().parse_args(ctx, args)


def _only_one(param: typer.CallbackParam, value: int | None) -> None:
    if value not in (None, 1):
        raise typer.BadParameter(
            f"{value}; this version runs a model on one device: give 1 or leave {param.opts[0]} out, "
            "and start an engine per device to use more of them"
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
"""Flags of vLLM that are taken while they ask for nothing."""
