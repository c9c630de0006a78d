"""`<think>…</think>` at the start of an answer: Qwen3, DeepSeek-R1 and many others."""

from __future__ import annotations

from sagellm.core.protocols.parsers import (
    AnswerParser,
    Content,
    Reasoning,
    ReasoningParserProtocol,
)
from sagellm.engines.parsers.buffered import BufferedParser, tag_start

_OPEN, _CLOSE = "<think>", "</think>"
_DEEPSEEK = "<｜Assistant｜>"


class ThinkParser(ReasoningParserProtocol):
    """Reasoning that the answer opens, or the prompt: some templates write the first tag themselves.

    Source: the chat template of Qwen3. Subclasses may have other tags.
    """

    open_tag, close_tag = _OPEN, _CLOSE

    def fits(self, chat_template: str) -> bool:
        """Say whether the template has a tag of it, and is not one of DeepSeek-R1."""
        return self.close_tag in chat_template and _DEEPSEEK not in chat_template

    def start(self, prompt_end: str) -> AnswerParser:
        """Begin an answer."""
        return ThinkingAnswer(self.open_tag, self.close_tag, is_open=self._is_open(prompt_end))

    def tags(self, prompt_end: str) -> tuple[str, str] | None:
        """Return the tags, the first as "" if the prompt opened it."""
        if self._is_open(prompt_end):
            return "", self.close_tag
        return None if self._is_closed(prompt_end) else (self.open_tag, self.close_tag)

    def _is_open(self, prompt_end: str) -> bool:
        return prompt_end.rstrip().endswith(self.open_tag)

    def _is_closed(self, prompt_end: str) -> bool:
        return prompt_end.rstrip().endswith(self.close_tag)


class DeepSeekR1Parser(ThinkParser):
    """Reasoning that begins each answer, with or without its first tag.

    Source: the chat template of DeepSeek-R1; earlier ones leave the tag to the model, which may omit it.
    """

    def fits(self, chat_template: str) -> bool:
        """Say whether the template is DeepSeek's and has a tag of it."""
        return self.close_tag in chat_template and _DEEPSEEK in chat_template

    def _is_open(self, prompt_end: str) -> bool:
        return not self._is_closed(prompt_end)


class ThinkingAnswer(BufferedParser):
    """One answer: whitespace around the tags belongs to neither side."""

    def __init__(self, open_tag: str, close_tag: str, *, is_open: bool) -> None:
        super().__init__()
        self._open_tag, self._close_tag = open_tag, close_tag
        self._is_open = is_open
        self._space = ""
        self.state = self._read_start

    def _read_start(self) -> bool:
        """Pass over the first tag if it is there."""
        body = self.text.lstrip()
        if not self.is_over and len(body) < len(self._open_tag) and self._open_tag.startswith(body):
            return False
        if body.startswith(self._open_tag):
            self.text, self._is_open = body[len(self._open_tag) :], True
        self.state = self._skip_space if self._is_open else self._read_content
        return True

    def _skip_space(self) -> bool:
        self.text = self.text.lstrip()
        if not self.text:
            return False
        self.state = self._read_reasoning
        return True

    def _read_reasoning(self) -> bool:
        end = tag_start(self.text, (self._close_tag,))
        is_tag = self.text.startswith(self._close_tag, end)
        text = self._space + self.take(len(self.text) if self.is_over and not is_tag else end)
        kept = text.rstrip()
        self.add(Reasoning(kept))
        self._space = text[len(kept) :]
        if is_tag:
            self.take(len(self._close_tag))
            self.state = self._skip_to_content
        return is_tag

    def _skip_to_content(self) -> bool:
        self.text = self.text.lstrip()
        if self.text:
            self.state = self._read_content
        return bool(self.text)

    def _read_content(self) -> bool:
        self.add(Content(self.take(len(self.text))))
        return False
