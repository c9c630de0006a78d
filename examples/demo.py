"""Ask the embedded model a question, show its answer as it comes, and what was measured: `hatch run demo`."""

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from sagellm.engines import LLMEngine, RequestOutput
from sagellm.engines.text import ChatMessage

SYSTEM = ChatMessage("system", "You are a helpful assistant.")
QUESTIONS = ["What is a KV cache?", "What does a scheduler do?", "Tell me a short story about a fox."]


def ask(engine: LLMEngine, question: str, console: Console) -> RequestOutput:
    """Print the answer while it is generated, and return it."""
    params = replace(engine.default_params, max_tokens=400, seed=0)
    engine.add_request(engine.chat_template.render([SYSTEM, ChatMessage("user", question)]), params)
    num_printed = 0
    while True:
        for output in engine.step():
            text = output.outputs[0].text
            console.out(text[num_printed:], end="", highlight=False)
            num_printed = len(text)
            if output.finished:
                console.out("\n")
                return output


def main() -> None:
    """Ask three questions with one system prompt, and print a table."""
    console = Console()
    engine = LLMEngine(num_blocks=512)  # no model named: the embedded one
    table = Table("question", "TTFT", "TPOT", "tokens/s", "output", "cached")
    for question in QUESTIONS:
        console.print(f"[bold]{question}")
        output = ask(engine, question, console)
        metrics = output.metrics
        table.add_row(
            question,
            f"{(metrics.ttft or 0) * 1e3:.1f} ms",
            f"{(metrics.tpot or 0) * 1e3:.2f} ms",
            f"{metrics.throughput or 0:.0f}",
            f"{len(output.outputs[0].token_ids)} tokens",
            f"{output.num_cached_tokens} of {len(output.prompt_token_ids)}",
        )
    console.print(table)
    console.print("next: hatch shell, then sage llm chat, or sage llm serve for the OpenAI API")


if __name__ == "__main__":
    main()
