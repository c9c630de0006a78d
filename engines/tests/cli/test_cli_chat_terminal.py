"""`chat` on a terminal of its own: what Ctrl-C and Ctrl-D do there."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from sagellm.engines.cli.chat.terminal import Terminal
from sagellm.engines.testing.steps import HeldCores
from sagellm.testing.patience import PATIENCE_S, wait_until

FLAGS = ("--device", "cpu", "--dtype", "float32", "--num-blocks", "512", "--temperature", "0")


class TerminalProgram:
    """A program on a terminal of its own."""

    def __init__(self, *arguments, echoes=False, variables=None):
        self.keys, theirs = pty.openpty()
        if not echoes:
            attributes = termios.tcgetattr(theirs)
            attributes[3] &= ~termios.ECHO
            termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        command = [sys.executable, "-m", "sagellm.engines.cli", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", **(variables or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *command], stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text):
        """Read until a text comes, and return what came with it."""
        while text not in self.seen:
            if not select.select([self.keys], [], [], PATIENCE_S)[0]:
                raise AssertionError(f"{text!r} did not come; there is {self.seen!r}")
            try:
                self.seen += os.read(self.keys, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"{text!r} did not come; at the end {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def type(self, text):
        os.write(self.keys, text.encode())

    def is_waiting(self):
        """Say whether the program sleeps, as it does while it waits for a key."""
        return ") S " in Path(f"/proc/{self.process.pid}/stat").read_text()

    def press(self, key):
        """Type a key that does something, again if it came just before it was waited for."""
        wait_until(self.is_waiting)
        self.type(key)
        if not select.select([self.keys], [], [], 30)[0]:
            self.type(key[-1])

    def end(self, key):
        """Type a key that leaves, read to the end and return the exit code."""
        self.press(key)
        try:
            while os.read(self.keys, 4096):
                pass
        except OSError:  # Linux says so that nobody writes any more
            pass
        os.close(self.keys)
        return self.process.wait(PATIENCE_S)


# Makes standard input the terminal that sends this process its signals, then becomes the program.
_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.full
def test_ctrl_c_stops_an_answer_and_not_the_program(checkpoint, tmp_path):
    arguments = ("llm", "chat", "--model", checkpoint, *FLAGS, "--max-tokens", "3900", "--ignore-eos")
    program = TerminalProgram(*arguments, variables=HeldCores(tmp_path, "chat", 1000).environment)
    program.wait_for("> ")
    program.type("Hello\n")
    while len(program.seen) < 200:  # the answer has begun
        program.seen += os.read(program.keys, 4096).decode(errors="replace")
    program.type("\x03")
    ended = program.wait_for("stopped]")
    assert int(ended.rpartition("[")[2].partition(" tokens")[0]) < 3900
    program.wait_for("> ")
    program.type(f"/save {tmp_path / 'chat.json'}\n")
    program.wait_for("2 messages are in")
    program.wait_for("> ")
    assert program.end("\x04") == 0
    question, answer = json.loads((tmp_path / "chat.json").read_text())
    assert question == {"role": "user", "content": "Hello"}
    assert (answer["role"], len(answer["content"]) > 50) == ("assistant", True)


def test_an_answer_cannot_control_the_terminal(monkeypatch, capfd):
    terminal = Terminal()
    terminal.write("a\x1b[2J\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Terminal().write("a\x1b[2J\x9b\tb\n")
    assert capfd.readouterr().out == "a\na\ufffd[2J\ufffd\tb\n"


@pytest.mark.full
def test_a_second_ctrl_c_at_the_prompt_leaves(checkpoint):
    program = TerminalProgram("llm", "chat", "--model", checkpoint, *FLAGS)
    program.wait_for("> ")
    program.press("half a line\x03")
    program.wait_for("so does another Ctrl-C")
    program.wait_for("> ")
    assert program.end("\x03") == 0


def test_ctrl_c_behind_something_typed_clears_it_and_does_not_leave(checkpoint):
    program = TerminalProgram("llm", "chat", "--model", checkpoint, *FLAGS, "--max-tokens", "8", echoes=True)
    program.wait_for("> ")
    program.press("\x03")
    program.wait_for("so does another Ctrl-C")
    program.wait_for("> ")
    for typed, shown in (("half a line", "half a line"), ('"""quoted\n', ". "), ("/und", "/und")):
        program.type(typed)
        program.wait_for(shown)  # as Ctrl-C discards what was not read yet
        program.press("\x03")
        program.wait_for("so does another Ctrl-C")
        program.wait_for("> ")
    program.type("/undo\n")
    program.wait_for("there is nothing to undo")
    program.wait_for("> ")
    program.press("\x03")
    program.wait_for("so does another Ctrl-C")
    program.wait_for("> ")
    assert program.end("\x03") == 0


def test_what_is_pasted_is_one_question_and_words_stay_whole(checkpoint, tmp_path):
    program = TerminalProgram("llm", "chat", "--model", checkpoint, *FLAGS, "--max-tokens", "8")
    fcntl.ioctl(program.keys, termios.TIOCSWINSZ, struct.pack("4H", 24, 30, 0, 0))
    program.wait_for("> ")
    program.type("\x1b[200~First line\nsecond line\x1b[201~\n")
    program.wait_for("cached")
    program.wait_for("> ")
    for line in ('"""One\n', "\n"):
        program.type(line)
        program.wait_for(". ")
    program.type('two"""\n')
    program.wait_for("cached")
    for line, told in (
        ("/regen", "cached"),
        (f"/save {tmp_path / 'chat.json'}", "4 messages"),
        (f"/load {tmp_path / 'chat.json'}", "4 messages"),
    ):
        program.wait_for("> ")
        program.type(f"{line}\n")
        program.wait_for(told)
    program.wait_for("> ")
    assert program.end("\x04") == 0
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert [each["content"] for each in saved[::2]] == ["First line\nsecond line", "One\n\ntwo"]
