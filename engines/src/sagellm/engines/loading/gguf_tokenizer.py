"""The tokenizer and chat template that a GGUF file brings, as one of the library tokenizers.

Two kinds are read: "gpt2", byte-level BPE with merges, which names how words are divided
(`tokenizer.ggml.pre`), and "llama", SentencePiece's BPE, whose merges follow from the scores. A file does not
say what surrounds added tokens (their `lstrip` and `rstrip`) nor how text is normalized: that is as in the
tokenizers which the names stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from sagellm.core import CheckpointError, UnsupportedModelError, get_logger
from sagellm.engines.config.shown import shown
from sagellm.engines.loading.gguf_header import read_gguf_header
from sagellm.engines.loading.json_tokenizer_files import QWEN2_WORDS
from sagellm.engines.loading.tokenizer_limits import (
    MAX_ADDED,
    MAX_ADDED_CHARACTERS,
    MAX_ENTRIES,
    MAX_TOKEN_CHARACTERS,
    check_count,
    max_bytes_of,
)
from sagellm.engines.text.json_tokenizer import JsonTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3"), _LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2_WORDS),
    "tekken": _TEKKEN_WORDS,
}
_OF_GPT2 = ("gpt-2", "smollm", "default")
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "tekken"})
"""Where a word that is in the vocabulary is one token, whatever its merges; these begin texts with BOS."""
_MAX_SPLITS = 1 << 26  # characters of all halves of all pieces of SentencePiece; Llama 2 has 2 million
_MAX_TEMPLATE_BYTES = max_bytes_of("chat_template.jinja")
_PREFIX = "▁"


class _Vocabulary:
    """The tokenizer's entries of a file, checked."""

    def __init__(self, path: Path, entries: Mapping[str, Any]) -> None:
        self.path, self._entries = path, entries
        tokens = self._list("tokens", bytes)
        if not tokens:
            raise CheckpointError(f"{path} has no vocabulary (tokenizer.ggml.tokens); {_ADVICE}")
        check_count(path, "tokens", len(tokens), MAX_ENTRIES)
        check_count(path, "bytes in a token", max(map(len, tokens)), MAX_TOKEN_CHARACTERS)
        self.tokens = [token.decode(errors="replace") for token in tokens]
        self.kinds: Sequence[int] = self._list("token_type", int) or [1] * len(tokens)
        self.scores: Sequence[float] = self._list("scores", float)
        if len(self.kinds) != len(tokens) or (self.scores and len(self.scores) != len(tokens)):
            raise CheckpointError(
                f"{path} has {len(tokens)} tokens, types for {len(self.kinds)} and scores for "
                f"{len(self.scores)} of them"
            )
        self.ids = {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind != _UNUSED
        }
        self.added = [
            AddedToken(token, special=self.kinds[index] != _USER_DEFINED, normalized=False)
            for token, index in self.ids.items()
            if self.kinds[index] in (_CONTROL, _USER_DEFINED)
            or (self.kinds[index] == _UNKNOWN and self.text("model") == "llama")
        ]
        check_count(path, "added tokens", len(self.added), MAX_ADDED)
        num_characters = sum(len(token.content) for token in self.added)
        check_count(path, "characters in its added tokens", num_characters, MAX_ADDED_CHARACTERS)

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges of byte-level BPE, first ones first."""
        texts = self._list("merges", bytes)
        check_count(self.path, "merges", len(texts), MAX_ENTRIES)
        merges: list[tuple[str, str]] = []
        for text in texts:
            merge = text.decode(errors="replace")
            left, space, right = merge.partition(" ")
            if not space or left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise CheckpointError(
                    f"{self.path}: tokenizer.ggml.merges has {shown(merge)}, which does not make one "
                    f"token of two"
                )
            merges.append((left, right))
        return merges

    def text(self, name: str) -> str | None:
        """Return an entry that is a text, None if there is none."""
        value = self._entries.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, str) else None

    def flag(self, name: str, *, default: bool) -> bool:
        """Return an entry that is true or false."""
        value = self._entries.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, bool) else default

    def named(self) -> dict[str, str]:
        """Return the special tokens by what transformers calls them. Raises CheckpointError for a bad id."""
        named: dict[str, str] = {}
        for name, known in _NAMED.items():
            index = self._entries.get(f"tokenizer.ggml.{name}_token_id")
            if index is None:
                continue
            if type(index) is not int or not 0 <= index < len(self.tokens):
                raise CheckpointError(
                    f"{self.path}: tokenizer.ggml.{name}_token_id is {shown(index)}, and there are "
                    f"{len(self.tokens)} tokens"
                )
            named[known] = self.tokens[index]
        return named

    def template(self) -> Any:
        """Return the chat template, or several by name."""
        entries, key = self._entries, "tokenizer.chat_template"
        named = {"default": key} | {
            name.removeprefix(f"{key}."): name for name in entries if name.startswith(f"{key}.")
        }
        found = {name: entries[each] for name, each in named.items() if isinstance(entries.get(each), str)}
        for template in found.values():
            check_count(self.path, "characters of a chat template", len(template), _MAX_TEMPLATE_BYTES)
        return found.get("default") if len(found) < 2 else found

    def _list(self, name: str, kind: type) -> Any:
        values = self._entries.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(values, list) or (values and type(values[0]) is not kind):
            raise CheckpointError(f"{self.path}: tokenizer.ggml.{name} is not a list of {kind.__name__}")
        return values


_ADVICE = "name another tokenizer (model.tokenizer, --tokenizer): the model's repository, or a directory"


def open_gguf_tokenizer(path: Path) -> JsonTokenizer | None:
    """Return the tokenizer of a GGUF file, or None if it has none.

    Raises CheckpointError for one that is damaged, UnsupportedModelError for one of another kind.
    """
    entries = read_gguf_header(path, with_vocabulary=True).entries
    kind = entries.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        logger.warning("%s has no tokenizer; prompts must be token ids", path)
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{path} has a tokenizer of the kind {shown(kind)} (tokenizer.ggml.model), which is not read; "
            f"gpt2 and llama are: {_ADVICE}"
        )
    vocabulary = _Vocabulary(path, entries)
    named = vocabulary.named()
    try:
        backend, is_begun = (_byte_level if kind == "gpt2" else _sentencepiece)(vocabulary)
        _surround(backend, vocabulary, named, is_begun=vocabulary.flag("add_bos_token", default=is_begun))
        backend.add_tokens(vocabulary.added)
    except Exception as error:  # of the library tokenizers, which has no types
        if isinstance(error, CheckpointError | UnsupportedModelError):
            raise
        raise CheckpointError(f"the tokenizer in {path} cannot be made: {error}; {_ADVICE}") from error
    special = [token.content for token in vocabulary.added if token.special]
    extra = [token for token in special if token not in named.values()]
    template = vocabulary.template()
    return JsonTokenizer(
        backend,
        {"extra_special_tokens": extra, "clean_up_tokenization_spaces": False, **named},
        named,
        class_name="TokenizersBackend",
        chat_template=template,
        load=lambda: _load(backend, named, extra, template),
    )


def _load(
    backend: Backend, named: Mapping[str, str], extra: list[str], template: Any
) -> PreTrainedTokenizerBase:
    """Make transformers' tokenizer of the same parts."""
    from transformers import PreTrainedTokenizerFast

    loaded: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=extra,
        clean_up_tokenization_spaces=False,
        chat_template=template,
        **named,
    )
    return loaded


def _byte_level(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """Return byte-level BPE, and whether its texts begin with BOS unless the file says otherwise."""
    pre = vocabulary.text("pre") or "default"
    if pre not in _WORDS and pre not in _OF_GPT2:
        raise UnsupportedModelError(
            f"{vocabulary.path} divides words by {shown(pre)} (tokenizer.ggml.pre), which is not read; "
            f"{', '.join((*_WORDS, *_OF_GPT2))} are: {_ADVICE}"
        )
    if pre == "default":
        logger.warning(
            "%s does not say how words are divided (tokenizer.ggml.pre): as GPT-2 does", vocabulary.path
        )
    is_whole = pre in _WHOLE_WORDS
    backend = Backend(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=is_whole))
    if pre in _WORDS:
        split = pre_tokenizers.Split(Regex(_WORDS[pre]), behavior="isolated", invert=False)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        if _WORDS[pre] == QWEN2_WORDS:
            backend.normalizer = normalizers.NFC()
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, is_whole


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """Return SentencePiece's BPE. As in llama.cpp, text behind a special token begins with a space, too."""
    ids = vocabulary.ids
    unknown = next((token for token, index in ids.items() if vocabulary.kinds[index] == _UNKNOWN), None)
    backend = Backend(
        models.BPE(
            vocab=ids, merges=_merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    steps = [decoders.Replace(_PREFIX, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", _PREFIX)
    if vocabulary.flag("add_space_prefix", default=True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_PREFIX), spaces])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that follow from the scores: two pieces become the one that both together are.

    The pair whose whole has the highest score comes first, as in transformers' conversion.
    """
    ids, special = vocabulary.ids, {token.content for token in vocabulary.added}
    if not vocabulary.scores:
        raise CheckpointError(f"{vocabulary.path} has no scores of its tokens (tokenizer.ggml.scores)")
    pieces = [(piece, index) for piece, index in ids.items() if piece not in special]
    num_splits = sum(len(piece) ** 2 for piece, _ in pieces)
    check_count(vocabulary.path, "characters in all halves of its pieces", num_splits, _MAX_SPLITS)
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in pieces:
        halves = [
            (ids[piece[:cut]], ids[piece[cut:]], cut)
            for cut in range(1, len(piece))
            if piece[:cut] in ids and piece[cut:] in ids
        ]
        score = vocabulary.scores[index]
        found += [(score, cut, len(piece) - cut, piece[:cut], piece[cut:]) for *_, cut in sorted(halves)]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _surround(backend: Backend, vocabulary: _Vocabulary, named: Mapping[str, str], *, is_begun: bool) -> None:
    """Add the tokens that each text begins and ends with."""
    begin = named.get("bos_token") if is_begun else None
    end = named.get("eos_token") if vocabulary.flag("add_eos_token", default=False) else None
    if begin is None and end is None:
        return
    around = [token for token in (begin, end) if token is not None]
    single = [*([begin] if begin else []), "$A", *([end] if end else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(part.replace("$A", "$B") for part in single)],
        special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys(around)],
    )
