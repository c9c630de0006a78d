"""Synthetic prompts: random token ids, or common words, with shared prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sagellm.core import ConfigError

_FIRST_ID = 3  # most vocabularies have padding, begin and end below it

Prompt = list[int] | str

# Short words that most vocabularies hold as one token each, with the space before.
_TEXT = """
the of and to in is that it for was on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know
"""
_WORDS = _TEXT.split()


def check_vocab_size(vocab_size: int) -> None:
    """Raise ConfigError for a vocabulary too small to draw ids from."""
    if vocab_size <= _FIRST_ID:
        raise ConfigError(f"vocab_size is {vocab_size}; it must be at least {_FIRST_ID + 1}")


def draw_ids(rng: Random, num_tokens: int, vocab_size: int) -> list[int]:
    """Draw token ids from 3 … vocab_size − 1."""
    span = vocab_size - _FIRST_ID
    return [_FIRST_ID + int(rng.random() * span) for _ in range(num_tokens)]


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """What prompts are made of.

    `prefix_share` is the share of every prompt, from its start, that is a common prefix; there are
    `num_prefixes` such prefixes. Ids are drawn from 3 … vocab_size − 1.
    """

    as_ids: bool = True
    vocab_size: int = 4000
    prefix_share: float = 0.0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        check_vocab_size(self.vocab_size)
        if not 0 <= self.prefix_share <= 1:
            raise ConfigError(f"prefix_share is {self.prefix_share}; it must be between 0 and 1")
        if self.num_prefixes < 1:
            raise ConfigError(f"num_prefixes is {self.num_prefixes}; it must be at least 1")


class PromptMaker:
    """Makes prompts; the same seed gives the same ones, another seed none with a common prefix.

    A text prompt has as many words as tokens were requested; only the server knows its token count.
    """

    def __init__(self, settings: PromptSettings, seed: int | str) -> None:
        self._settings = settings
        self._seed = seed
        self._rng = Random(f"prompts {seed}")
        self._common: dict[str, tuple[Random, list[int]]] = {}

    def make(self, num_tokens: int) -> Prompt:
        """Make the next prompt."""
        settings = self._settings
        num_common = round(num_tokens * settings.prefix_share)
        common: list[int] = []
        if num_common:
            common = self._beginning(f"prefix {self._rng.randrange(settings.num_prefixes)}", num_common)
        return self.form(common + self._draw(self._rng, num_tokens - num_common))

    def make_of_blocks(self, block_ids: tuple[int, ...], block_tokens: int, num_tokens: int) -> Prompt:
        """Make a prompt of named blocks: prompts that begin with the same names share a prefix."""
        ids: list[int] = []
        for block_id in block_ids:
            wanted = min(block_tokens, num_tokens - len(ids))
            ids += self._draw(Random(f"block {block_id} {self._seed}"), max(0, wanted))
        return self.form(ids + self._draw(self._rng, num_tokens - len(ids)))

    def _beginning(self, name: str, num_tokens: int) -> list[int]:
        """Return the start of a common stream of tokens, which grows on demand."""
        rng, ids = self._common.setdefault(name, (Random(f"{name} {self._seed}"), []))
        ids += self._draw(rng, num_tokens - len(ids))
        return ids[:num_tokens]

    def _draw(self, rng: Random, num_tokens: int) -> list[int]:
        return draw_ids(rng, num_tokens, self._settings.vocab_size)

    def form(self, ids: list[int]) -> Prompt:
        """Return ids as they are, or a word for each."""
        if self._settings.as_ids:
            return ids
        return " ".join(_WORDS[number % len(_WORDS)] for number in ids)
