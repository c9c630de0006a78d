"""Puts what a user says into other words: small talk around it, words left out, its parts swapped.

The answer stays, so that a model learns to look for what the question is about and to pass over the rest.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from corpus.sample import Dialogue, Message, Sample
from corpus.tables.read import split, words
from corpus.wording import NAMES, capital

WHO = split(
    "my friend/my sister/my brother/my teacher/my neighbour/my team/my manager/my cousin/my student/"
    "my mother/a customer/a visitor/a child/someone at work/someone online/everybody here/the new guy/"
    "our intern",
    "/",
)
SAYS = split(
    "asks/wants to know/asked me/keeps asking/is wondering/would like to hear/needs to know/"
    "said I should ask you/could not tell me/asks me every day/forgot/must know/is curious",
    "/",
)
LEADS = split(
    "I read about this yesterday/I have an exam tomorrow/I am new here/I forgot this/"
    "I am writing a report/This may be a silly question/Sorry to bother you/Last question for today/"
    "Help me out/Now something else/Since we are at it/By the way/Let me ask you something/"
    "There is one thing I never understood/No rush/Before I go home/Between us/Well/Okay/So/Listen/And/"
    "Now/Alright/For the record/As far as you know/Without looking it up/In your words/Hi again/"
    "Good morning/Hello there/A riddle/Here is a puzzle/Next/First things first/One more/Just checking/"
    "I am stuck/We had a fight about this/I bet you know this/I was asked at school/Time for a test/"
    "Question of the day/For my homework/For a friend/To be sure/I want to get this right/Pardon me/"
    "Tell me, please/Could you say/Would you know/I ask myself/Any idea/Guess/Remind me/Say/"
    "Think about it/Let us see/In plain words/For beginners/Seriously/In short/Simply",
    "/",
)
TRAILS = split(
    "I am curious./I have no idea./I keep forgetting it./if you do not mind/in your own words/"
    "for my notes/for a talk tomorrow/I would love to know./That is all./again/roughly/in general/then/"
    "exactly/please/right?/I mean/for me/for once/if you can/when you have time/I was never told./"
    "Nobody here knows./It is for school./I want to learn./Make it simple./Keep it short./nice and clear/"
    "in a nutshell/Thank you!/Thanks a lot./ok?/would you say/do you think/you think/anyway/today/here/"
    "as a rule/to begin with/if I may ask/Cheers/go on",
    "/",
)
INSIDE = split("really/actually/exactly/roughly/just/then/even/usually/now/basically/only/again/simply", "/")
DROPPED = frozenset(
    words(
        "what is the a an of do does are in to me my i you can could would please it that for exactly tell "
        "explain about on and so we will how by should have be there this with or give"
    )
)
# Words and others that a question may have in their place.
SYNONYMS = {
    first: split(others, "/")
    for first, others in (
        ("difference", "contrast/distinction"),
        ("example", "instance/case"),
        ("need", "require/want/care for"),
        ("useful", "helpful/handy/of use"),
        ("important", "a big deal/worth knowing"),
        ("happens", "goes on/takes place/is going on"),
        ("drawback", "catch/weak side/problem"),
        ("downside", "catch/weak side/problem"),
        ("purpose", "aim/role/job"),
        ("point", "aim/sense"),
        ("steps", "stages/parts"),
        ("use", "employ/apply/take"),
        ("work", "function/go/get done"),
        ("works", "functions/goes/gets done"),
        ("mean", "stand for/signify/say"),
        ("exist", "come about/stay around"),
        ("benefits", "good sides/gains/upsides"),
        ("describe", "sketch/outline/paint"),
        ("define", "pin down/say clearly"),
        ("cost", "take from me/use up"),
        ("big", "large/huge"),
        ("small", "little/tiny"),
        ("good", "nice/fine"),
        ("story", "tale/little story/bedtime story"),
        ("kinds", "sorts/types"),
        ("people", "users/folks"),
        ("fast", "quick/speedy"),
        ("run", "execute/start"),
        ("get", "receive/obtain"),
        ("make", "create/produce"),
        ("show", "print/display"),
        ("which", "what"),
        ("called", "named/known as"),
        ("bigger", "larger/greater"),
        ("color", "colour/shade"),
        ("comes", "follows/is next"),
        ("many", "a lot of"),
        ("keep", "hold/store"),
        ("stores", "holds/keeps"),
        ("memory", "storage/room"),
        ("answer", "reply/response"),
        ("start", "begin/launch"),
        ("want", "wish for/need"),
        ("know", "hear/learn"),
    )
}
# Openings that mean the same; {x} is what follows.
OPENINGS: dict[str, tuple[str, ...]] = {
    "what is": (
        "{x}: what is that?",
        "{x}, what would that be?",
        "{x} is what?",
        "what do we call {x}?",
        "spell out {x} for me",
        "put {x} in simple words",
        "I need to understand {x}",
        "fill me in on {x}",
        "{x}? Never heard of it.",
        "what kind of thing is {x}?",
        "the idea behind {x}?",
        "what should I picture under {x}?",
        "I hear {x} everywhere. What is it?",
        "translate {x} into plain English",
        "what does one mean by {x}?",
        "what's meant by {x}?",
    ),
    "how does": ("{x}, how?", "in what way does {x}?", "by which means does {x}?", "what makes {x}?"),
    "how many": ("what number of {x}?", "count for me: {x}", "{x}: how many?", "the number of {x}?"),
    "why": ("{x}, why is that?", "for what reason {x}?", "how come {x}?", "what is the reason that {x}?"),
    "explain": ("make me understand {x}", "{x}, in plain words", "I need {x} explained", "shed light on {x}"),
    "tell me about": ("what do you know about {x}?", "say something on {x}", "{x}, what about it?"),
    "write": ("compose {x}", "I want {x}", "I would like to read {x}", "{x}, please", "make up {x}"),
    "tell me": ("let me hear {x}", "I want to hear {x}", "{x}, please", "give me {x}", "how about {x}?"),
    "list": (
        "name {x}",
        "give me {x}",
        "{x}, please",
        "I need {x}",
        "write down {x}",
        "which {x} are there?",
    ),
    "name": ("list {x}", "tell me {x}", "{x}, please", "I need {x}", "write down {x}", "say {x}"),
}


def disguise(sample: Sample, rng: random.Random, *, strength: float) -> Sample:
    """Return a sample whose user says the same in other words.

    With `strength` 1 every message changes and words may be lost; below that only so large a share does,
    and nothing but small talk is added.
    """
    if not isinstance(sample, Dialogue):
        return sample
    return replace(sample, messages=tuple(_disguise(one, rng, strength) for one in sample.messages))


def _disguise(message: Message, rng: random.Random, strength: float) -> Message:
    if message.role != "user" or rng.random() > strength:
        return message
    text = message.content
    if strength == 1.0 and "\n" not in text and len(text) < 160:
        for change in rng.sample((_reopen, _swap, _drop, _insert, _replace), rng.choice((0, 1, 1, 2, 2, 3))):
            text = change(text, rng)
    return replace(message, content=_around(text, rng))


def _reopen(text: str, rng: random.Random) -> str:
    """Say the opening in other words."""
    for opening, others in OPENINGS.items():
        found = re.match(rf"{opening}\b\s*(.+?)[?.!]*$", text, re.IGNORECASE)
        if found:
            return rng.choice(others).format(x=found[1])
    return text


def _swap(text: str, rng: random.Random) -> str:
    """Put the end first: `the KV cache, what is`."""
    words = text.rstrip("?.!").split()
    if not 3 <= len(words) <= 14:
        return text
    cut = rng.randint(1, len(words) - 1)
    joint = rng.choice((", ", ": ", " - ", "; ", ". "))
    return " ".join(words[cut:]) + joint + " ".join(words[:cut]) + rng.choice(("?", "?", "", "."))


def _drop(text: str, rng: random.Random) -> str:
    """Leave out small words."""
    share = rng.choice((0.3, 0.6, 1.0))
    kept = [
        word for word in text.split() if word.lower().strip("?.,!") not in DROPPED or rng.random() > share
    ]
    return " ".join(kept) if len(kept) > 1 else text


def _insert(text: str, rng: random.Random) -> str:
    """Put words in that change nothing."""
    words = text.split()
    for _ in range(rng.randint(1, 2)):
        words.insert(rng.randint(0, len(words)), rng.choice(INSIDE))
    return " ".join(words)


def _replace(text: str, rng: random.Random) -> str:
    """Take other words where there are any."""

    def other(found: re.Match[str]) -> str:
        others = SYNONYMS.get(found[0].lower())
        return rng.choice(others) if others and rng.random() < 0.8 else found[0]

    return re.sub(r"[A-Za-z]+", other, text)


def _around(text: str, rng: random.Random) -> str:
    """Put small talk before the text, behind it, both or neither."""
    roll = rng.random()
    if roll < 0.5:
        if rng.random() < 0.4:
            who = rng.choice(WHO) if rng.random() < 0.8 else rng.choice(NAMES)
            lead = f"{who} {rng.choice(SAYS)}"
        else:
            lead = rng.choice(LEADS)
        text = capital(lead) + rng.choice((": ", ", ", ". ", " - ", "; ", "! ", "? ")) + text
    if 0.35 < roll < 0.75:
        trail = rng.choice(TRAILS)
        body = text.rstrip("?.!")
        mark = text[len(body) :]
        text = f"{text} {trail}" if trail[0].isupper() else f"{body}{rng.choice((' ', ', '))}{trail}{mark}"
    if rng.random() < 0.15:
        text = text.lower()
    return text
