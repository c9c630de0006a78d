"""Prints what was generated: text as it arrives, JSON, and timings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from sagellm.engines.cli.output import columns, print_json_line

if TYPE_CHECKING:
    from sagellm.engines import CompletionOutput, RequestOutput

_HEADING_CHARACTERS = 60


class TextPrinter:
    """Prints the continuations of all prompts one after another, each as it arrives.

    Only one can be printed at a time; the others follow in turn, with what they have by then. Headings go to
    standard error, so standard output contains only text.
    """

    def __init__(self, prompts: Sequence[str], num_continuations: int) -> None:
        self._lanes = [
            (prompt, index) for prompt in range(len(prompts)) for index in range(num_continuations)
        ]
        self._prompts = prompts
        self._latest: dict[int, RequestOutput] = {}
        self._lane = 0
        self._num_printed = 0  # characters of the current lane
        # On a terminal that does not show the text, a heading is noise and would cut the progress bar.
        self._has_headings = len(self._lanes) > 1 and (sys.stdout.isatty() or not sys.stderr.isatty())

    def update(self, prompt: int, output: RequestOutput) -> None:
        """Take the state of a prompt's request and print what is new and due."""
        self._latest[prompt] = output
        while self._lane < len(self._lanes):
            current = self._latest.get(self._lanes[self._lane][0])
            if current is None:
                return
            completion = current.outputs[self._lanes[self._lane][1]]
            self._print(completion)
            if completion.finish_reason is None:
                return
            typer.echo()
            self._lane, self._num_printed = self._lane + 1, 0

    def _print(self, completion: CompletionOutput) -> None:
        is_due = bool(completion.text) or completion.finish_reason is not None
        if self._has_headings and self._num_printed == 0 and is_due:
            typer.echo(self._heading(), err=True)
        typer.echo(completion.text[self._num_printed :], nl=False)
        self._num_printed = len(completion.text)

    def _heading(self) -> str:
        prompt = " ".join(self._prompts[self._lanes[self._lane][0]].split())
        short = prompt if len(prompt) <= _HEADING_CHARACTERS else f"{prompt[: _HEADING_CHARACTERS - 1]}…"
        gap = "\n" if self._lane else ""
        return f"{gap}[{self._lane + 1}/{len(self._lanes)}] {short}"


def print_outputs_json(outputs: Sequence[RequestOutput], prompts: Sequence[str]) -> None:
    """Print everything known about each request, one line of JSON each."""
    for output, prompt in zip(outputs, prompts, strict=True):
        print_json_line(_entry(output, prompt))


def print_timings(outputs: Sequence[RequestOutput]) -> None:
    """Print a table of times, one row per request, to standard error."""
    has_drafts = any(output.metrics.num_draft_tokens for output in outputs)
    head = [name for name in _TIMINGS if has_drafts or name != _DRAFTED]
    rows = [[_TIMINGS[name](output) for name in head] for output in outputs]
    typer.echo("\n" + columns(head, rows), err=True)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


_DRAFTED = "DRAFTED"
_TIMINGS: Mapping[str, Callable[[RequestOutput], str]] = {
    "PROMPT": lambda output: f"{len(output.prompt_token_ids)} tokens",
    "CACHED": lambda output: str(output.num_cached_tokens),
    "OUTPUT": lambda output: f"{sum(len(one.token_ids) for one in output.outputs)} tokens",
    _DRAFTED: lambda output: (
        f"{output.metrics.num_accepted_tokens} of {output.metrics.num_draft_tokens} accepted"
    ),
    "TTFT": lambda output: _milliseconds(output.metrics.ttft),
    "TPOT": lambda output: _milliseconds(output.metrics.tpot),
    "TOKENS/S": lambda output: (
        "-" if output.metrics.throughput is None else f"{output.metrics.throughput:.1f}"
    ),
    "END": lambda output: ", ".join(str(one.finish_reason) for one in output.outputs),
}
"""Columns of the table of times; that of drafts only if there were any."""


def _entry(output: RequestOutput, prompt: str) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "request_id": output.request_id,
        "prompt": prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": output.prompt_logprobs,
        "outputs": output.outputs,
        "metrics": {
            "ttft_s": metrics.ttft,
            "tpot_s": metrics.tpot,
            "total_time_s": metrics.total_time,
            "throughput_tokens_per_s": metrics.throughput,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
        },
    }
