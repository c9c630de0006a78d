"""Draws chat.svg: `python docs/images/chat.py`, what `sagellm chat` really shows in a terminal of tmux.

The embedded model answers, greedily, so that only the figures below the answers differ from run to run.
"""

from __future__ import annotations

import io
import re
import subprocess
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 96, 26
STEPS = (
    ("$ ", "sagellm chat --temperature 0"),
    ("> ", "What is a KV cache?"),
    ("> ", "What is prefix caching?"),
    ("> ", "How do I start a server?"),
    ("> ", "Tell me a small story."),
    ("> ", None),
)


def tmux(*arguments: str) -> str:
    """Run a command of tmux, with a server of its own."""
    command = ["tmux", "-L", "picture-of-chat", "-f", "/dev/null", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wait_for(prompt: str) -> str:
    """Wait until the last line is this prompt; return the screen with its colours."""
    while (tmux("capture-pane", "-p").rstrip().splitlines() or [""])[-1] != prompt.strip():
        time.sleep(0.2)
    return tmux("capture-pane", "-p", "-e").rstrip()


def main() -> None:
    """Hold the conversation, then draw the screen."""
    tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), "PS1='$ ' exec sh")
    try:
        for prompt, typed in STEPS:
            shown = wait_for(prompt)
            if typed is not None:
                tmux("send-keys", "-l", typed)
                tmux("send-keys", "Enter")
                time.sleep(0.5)
    finally:
        tmux("kill-server")
    # The fonts that rich names lie on a server; a picture of the documentation asks nobody for anything.
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(shown))
    drawn = re.sub(r"@font-face \{.*?\}\n", "", console.export_svg(title="sagellm chat"), flags=re.DOTALL)
    Path(__file__).with_suffix(".svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
