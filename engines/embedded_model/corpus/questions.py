"""Turns fact sheets into questions in many wordings, each with its answer."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path

from corpus.sample import Dialogue, Message, Passage, Sample

FACTS = Path(__file__).parent / "facts"
FACETS = ("what", "why", "how", "when", "cost", "example")

WORDINGS: dict[str, list[str]] = {
    "what": [
        "What is {x}?",
        "What is {x}? Please explain.",
        "What's {x}?",
        "What does {n} mean?",
        "What do you mean by {n}?",
        "What is meant by {n}?",
        "What do people mean by {n}?",
        "What does the term {n} stand for?",
        "Explain {x}.",
        "Explain {x} to me.",
        "Explain to me what {x} is.",
        "Please explain {x} in simple words.",
        "Can you explain {x}?",
        "Could you explain {n} for me?",
        "Define {n}.",
        "Give me a definition of {n}.",
        "Describe {x}.",
        "Describe {n} to a beginner.",
        "Tell me about {x}.",
        "Tell me what {x} is.",
        "I want to know what {x} is.",
        "I do not understand {x}.",
        "I have never heard of {n}. What is it?",
        "I keep reading about {n}. What is it?",
        "Somebody mentioned {n} today. What is that?",
        "Do you know what {x} is?",
        "What can you tell me about {n}?",
        "How would you describe {x}?",
        "How would you explain {n} to a child?",
        "What should I know about {n}?",
        "{n}?",
        "{n} meaning",
        "{n} definition",
        "meaning of {n}",
        "{n}, what is that?",
        "Help me understand {x}.",
        "So what exactly is {x}?",
        "Teach me about {n}.",
    ],
    "why": [
        "Why {n}?",
        "Why is {x} useful?",
        "Why is {x} important?",
        "Why do we need {x}?",
        "Why would I want {x}?",
        "Why should I care about {n}?",
        "Why do engines have {x}?",
        "Why does {n} matter?",
        "Why does {n} exist?",
        "What is {x} good for?",
        "What is the point of {n}?",
        "What is the use of {x}?",
        "What is the purpose of {x}?",
        "What is the reason for {n}?",
        "What does {n} help with?",
        "What does {n} bring?",
        "What problem does {n} solve?",
        "What would happen without {x}?",
        "What are the benefits of {n}?",
        "What do I gain from {n}?",
        "Tell me why {n} matters.",
        "Explain why we need {x}.",
        "Who needs {x}, and why?",
        "Is {x} really needed?",
    ],
    "how": [
        "How does {n} work?",
        "How does {x} work?",
        "How exactly does {n} work?",
        "How do you do {n}?",
        "How is {x} done?",
        "How is {n} made to work?",
        "How can I use {n}?",
        "How do I use {x}?",
        "Explain how {n} works.",
        "Explain how {x} works, step by step.",
        "Tell me how {x} works.",
        "Show me how {n} works.",
        "Walk me through {n}.",
        "Describe how {x} works.",
        "What are the steps of {n}?",
        "What happens in {n}?",
        "What goes on inside {x}?",
        "In which way does {n} work?",
        "I wonder how {x} works.",
        "Can you explain how {n} works?",
    ],
    "when": [
        "When do I use {x}?",
        "When should I use {n}?",
        "When is {x} useful?",
        "When does {n} help?",
        "When does {n} pay off?",
        "When would you use {n}?",
        "When do I need {x}?",
        "In which case should I use {n}?",
        "For which work is {n} good?",
        "Where is {n} used?",
        "Should I use {n}?",
        "Who should use {x}?",
    ],
    "cost": [
        "What does {n} cost?",
        "What does {x} cost?",
        "What is the cost of {n}?",
        "What is the drawback of {n}?",
        "What are the disadvantages of {n}?",
        "What is the downside of {x}?",
        "What is bad about {n}?",
        "What is the price of {n}?",
        "What do I lose with {n}?",
        "What are the limits of {n}?",
        "Is {n} expensive?",
        "Does {n} cost anything?",
        "What can go wrong with {n}?",
    ],
    "example": [
        "Give me an example of {n}.",
        "Give an example of {x}.",
        "Show me an example of {n}.",
        "Can you give an example of {n}?",
        "What is an example of {n}?",
        "Example of {n}?",
        "Is there an example of {n}?",
        "I need an example for {n}.",
        "Make {n} clear with an example.",
    ],
    "short": [
        "In one sentence, what is {x}?",
        "What is {x} in one sentence?",
        "What is {x}, in a few words?",
        "What is {x}, in short?",
        "Briefly, what is {x}?",
        "Define {n} in a few words.",
        "Explain {n} briefly.",
        "Short answer: what is {x}?",
        "Say in one line what {x} is.",
        "One sentence about {n}, please.",
    ],
    "long": [
        "Tell me everything you know about {n}.",
        "Explain {x} in detail.",
        "Give me a long explanation of {n}.",
        "Write a paragraph about {n}.",
        "Write a short text about {n}.",
        "I want to learn all about {n}.",
        "Give me a full introduction to {n}.",
    ],
    "versus": [
        "What is the difference between {x} and {y}?",
        "How is {x} different from {y}?",
        "How does {x} differ from {y}?",
        "{n} versus {m}?",
        "{n} or {m}?",
        "Compare {n} and {m}.",
        "{n} vs {m}",
        "Is {x} the same as {y}?",
        "Do not {n} and {m} mean the same?",
    ],
}


@dataclass
class FactSheet:
    """One subject: its names, its answers by facet, and questions of its own."""

    names: list[str]
    answers: dict[str, list[str]] = field(default_factory=dict)
    asks: list[tuple[list[str], str]] = field(default_factory=list)
    versus: dict[str, str] = field(default_factory=dict)

    @property
    def article(self) -> str:
        """The article that the subject is introduced with, or nothing."""
        for text in self.answers.get("what", []):
            first, _, rest = text.partition(" ")
            if first in ("A", "An", "The") and rest.lower().startswith(self.names[0].lower()):
                return first.lower() + " "
        return ""


def read_facts(folder: Path = FACTS) -> list[FactSheet]:
    """Read every fact sheet. Raises ValueError with file and line for what is not in the format."""
    sheets: list[FactSheet] = []
    for path in sorted(folder.glob("*.txt")):
        for number, line in _logical_lines(path):
            try:
                _add(sheets, line)
            except ValueError as error:
                raise ValueError(f"{path.name}:{number}: {error}") from None
    return sheets


def _logical_lines(path: Path) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line[0] in " \t" and lines:
            glue = "\n" if re.match(r"\s*(\d+\.|-) ", line) else " "
            lines[-1] = (lines[-1][0], lines[-1][1] + glue + line.strip())
        else:
            lines.append((number, line))
    return lines


def _add(sheets: list[FactSheet], line: str) -> None:
    if line.startswith("["):
        sheets.append(FactSheet([name.strip() for name in line.strip("[] ").split(";")]))
        return
    kind, _, text = line.partition(":")
    text = text.strip()
    if kind == "ask":
        questions, bar, answer = text.partition("|")
        if not bar:
            raise ValueError("an `ask` needs `question | answer`")
        sheets[-1].asks.append(([question.strip() for question in questions.split(" / ")], answer.strip()))
    elif kind.startswith("versus "):
        sheets[-1].versus[kind.removeprefix("versus ").strip()] = text
    elif kind in FACETS or kind == "short":
        sheets[-1].answers.setdefault(kind, []).append(text)
    else:
        raise ValueError(f"{kind!r} is no kind of line")


class Questions:
    """Draws a question and its answer from the fact sheets, all subjects alike."""

    def __init__(self, sheets: list[FactSheet]) -> None:
        self._sheets = sheets

    def make(self, rng: random.Random) -> Sample:
        """Return a dialogue of one or a few questions, or the same as plain text."""
        sheet = rng.choice(self._sheets)
        question, answer = self.draw(sheet, rng)
        if rng.random() < 0.15:
            return Passage(f"{question}\n{answer}")
        turns = [(question, answer)]
        if rng.random() < 0.12:
            turns.append(self.draw(sheet if rng.random() < 0.5 else rng.choice(self._sheets), rng))
        messages = [
            Message(role, text)
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return Dialogue(tuple(messages))

    def draw(self, sheet: FactSheet, rng: random.Random) -> tuple[str, str]:
        """Return a question about a sheet and its answer."""
        kinds = [kind for kind in ("what", "why", "how", "when", "cost", "example") if kind in sheet.answers]
        weights = [3.0 if kind == "what" else 1.0 for kind in kinds]
        if "short" in sheet.answers:
            kinds.append("short")
            weights.append(0.8)
        if len(sheet.answers) > 2:
            kinds.append("long")
            weights.append(0.5)
        if sheet.versus:
            kinds.append("versus")
            weights.append(0.7 * len(sheet.versus))
        if sheet.asks:
            kinds.append("ask")
            weights.append(1.0 * len(sheet.asks))
        kind = rng.choices(kinds, weights)[0]
        if kind == "ask":
            questions, answer = rng.choice(sheet.asks)
            return vary(rng.choice(questions), rng), answer
        name = sheet.names[0] if rng.random() < 0.6 else rng.choice(sheet.names)
        with_article = (sheet.article if rng.random() < 0.7 else "") + name
        wording = rng.choice(WORDINGS[kind])
        if kind == "versus":
            other, answer = rng.choice(sorted(sheet.versus.items()))
            return vary(wording.format(x=with_article, n=name, y=other, m=other), rng), answer
        return vary(wording.format(x=with_article, n=name), rng), self._answer(sheet, kind, rng)

    @staticmethod
    def _answer(sheet: FactSheet, kind: str, rng: random.Random) -> str:
        if kind == "short":
            subject = (sheet.article + sheet.names[0]).strip()
            return f"{subject[0].upper()}{subject[1:]} is {rng.choice(sheet.answers['short'])}."
        if kind == "long":
            parts = [rng.choice(sheet.answers[facet]) for facet in FACETS if facet in sheet.answers]
            return "\n\n".join(parts)
        return rng.choice(sheet.answers[kind])


def vary(question: str, rng: random.Random) -> str:
    """Write a question as people type it: capitals, marks and courtesy come and go."""
    question = question[0].upper() + question[1:]
    roll = rng.random()
    if roll < 0.06:
        question = (
            rng.choice(["Hi! ", "Hello, ", "Hey, ", "Please: ", "Question: ", "Quick question: "]) + question
        )
    elif roll < 0.10:
        question = question.rstrip("?.") + rng.choice([", please?", " please", "? Thanks."])
    if rng.random() < 0.15:
        question = question.lower()
    if rng.random() < 0.15:
        question = question.rstrip("?.")
    return question
