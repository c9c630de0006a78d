"""Makes a tokenizer of `tokenizer.json` and the settings beside it, as transformers' classes make it.

Those of our model families are of two kinds: one takes `tokenizer.json` as it is, the others take its
vocabulary, merges and post-processor, and bring the other steps themselves. What is rare is left to
transformers, whose import alone takes longer than all else at a start: that is why this is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers

from sagellm.engines.loading.tokenizer_settings import read_settings
from sagellm.engines.text.json_tokenizer import NAMED_TOKENS, JsonTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_OF_TEXT = "<|endoftext|>"
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_LEFT_TO_TRANSFORMERS = ("tekken.json", "additional_chat_templates")
_RENAMED = ("deepseek-ai/", "allenai/", "google/", "naver-clova-ix/", "salesforce/", "stepfun-ai/")
"""The makers of models whose tokenizer's class transformers tells by the model's name."""


class NeedsTransformersError(Exception):
    """A tokenizer has something that is left to transformers' own classes."""


@dataclass(frozen=True)
class _Class:
    """A class of transformers: special tokens and settings where none are given, and the steps it brings."""

    name: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    bring_steps: Callable[[Backend, Mapping[str, Any]], None] | None = None


def open_json_tokenizer(path: Path) -> JsonTokenizer:
    """Make the tokenizer of a directory.

    Raises NeedsTransformersError, CheckpointError, or errors of the library tokenizers: transformers' own
    loading may succeed, or says what is wrong.
    """
    settings = _read_settings(path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    _need(backend.padding is None and backend.truncation is None, "padding or truncation in tokenizer.json")
    if settings.get("clean_up_tokenization_spaces"):  # without effect on BPE, unless it is insisted on
        _need(isinstance(backend.model, models.BPE) and _FORCED not in settings, "spaces that are cleaned up")
    followed = _class_of(path, settings.pop("tokenizer_class", None))
    added = _added_tokens(settings.pop("added_tokens_decoder", None), backend)
    by_text = {str(token): token for token in added.values()}
    named = {name: by_text.get(str(token), token) for name, token in _named_tokens(settings).items()}
    # A token that is null in the settings is none, even if the class has a default.
    named |= {name: token for name, token in followed.tokens.items() if name not in settings}
    named = {name: named[name] for name in NAMED_TOKENS if name in named}
    if followed.bring_steps is not None:
        _need(isinstance(backend.model, models.BPE), "a vocabulary that is not of the kind BPE")
        loaded, backend = backend, Backend(backend.model)
        followed.bring_steps(backend, settings)
        backend.post_processor = loaded.post_processor
    backend.encode_special_tokens = settings.get("split_special_tokens", False)
    _add_tokens(backend, added, named, settings.get("extra_special_tokens") or [])
    tokenizer = JsonTokenizer(
        backend,
        {**followed.settings, **settings, **named},
        {name: str(token) for name, token in named.items()},
        class_name=followed.name,
        chat_template=_template(path, settings.get("chat_template")),
        load=lambda: _load(path),
    )
    if followed is _QWEN2:
        backend.add_tokens([AddedToken(token, special=True) for token in tokenizer.all_special_tokens])
    known = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    _need(len(tokenizer) > len(known), "no vocabulary")
    return tokenizer


def _load(path: Path) -> PreTrainedTokenizerBase:
    from sagellm.engines.loading.tokenizer import load_tokenizer

    loaded = load_tokenizer(path)
    assert loaded is not None, "there is a tokenizer.json"
    return loaded


def _need(condition: bool, otherwise: str) -> None:  # noqa: FBT001 - reads like an assertion
    if not condition:
        raise NeedsTransformersError(otherwise)


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings as transformers merges them: special tokens in a file of their own come last."""
    for name in _LEFT_TO_TRANSFORMERS:
        _need(not (path / name).exists(), name)
    settings = read_settings(path / "tokenizer_config.json")
    for name in ("add_bos_token", "add_eos_token"):  # tokenizer.json's post-processor decides
        settings.pop(name, None)
    if not settings.get("extra_special_tokens"):
        _rename(settings, "additional_special_tokens", "extra_special_tokens")
    if settings.get("added_tokens_decoder") is None:
        _need("added_tokens_decoder" not in settings, "null for added_tokens_decoder")
        _need(not (path / "added_tokens.json").exists(), "added_tokens.json")
        separate = read_settings(path / "special_tokens_map.json")
        _need("extra_special_tokens" not in separate, "extra_special_tokens in special_tokens_map.json")
        settings |= {name: _from_map(value) for name, value in separate.items()}
    if "extra_special_tokens" not in settings:
        _rename(settings, "additional_special_tokens", "extra_special_tokens")
    _check(settings)
    if settings.get("extra_special_tokens") is not None:
        settings["extra_special_tokens"] = [_token(each) for each in settings["extra_special_tokens"]]
    return settings


def _rename(settings: dict[str, Any], older: str, name: str) -> None:
    if older in settings:
        settings[name] = settings.pop(older)


def _from_map(value: Any) -> Any:
    """Return a value of special_tokens_map.json, where objects are special tokens without saying so."""
    if not isinstance(value, dict):
        return value
    return AddedToken(**{name: each for name, each in value.items() if name != "special"}, special=True)


def _check(settings: Mapping[str, Any]) -> None:
    """Raise NeedsTransformersError for settings of which there is more to say than what is followed here."""
    extra = settings.get("extra_special_tokens")
    _need(extra is None or isinstance(extra, list), "named extra_special_tokens")
    _need(settings.get("backend") in (None, "tokenizers"), "another backend")
    for side in ("padding_side", "truncation_side"):
        _need(settings.get(side, "left") in ("left", "right"), side)
    for name, value in settings.items():
        is_other = name.endswith("_token") and name not in NAMED_TOKENS
        _need(not is_other or not isinstance(value, str | dict | AddedToken), name)
    for name in ("model_specific_special_tokens", "fix_mistral_regex"):
        _need(name not in settings, name)
    for name in ("split_special_tokens", "legacy", "add_prefix_space"):
        _need(settings.get(name) in (None, True, False), name)


def _token(value: Any) -> AddedToken | str:
    """Return a special token of tokenizer_config.json: a text, or an object that says what it is."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{name: each for name, each in value.items() if name != "__type"})
    if not isinstance(value, str | AddedToken):
        raise NeedsTransformersError(f"a special token that is a {type(value).__name__}")
    return value


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, AddedToken | str]:
    return {name: _token(settings[name]) for name in NAMED_TOKENS if settings.get(name) is not None}


def _added_tokens(decoder: Any, backend: Backend) -> dict[int, AddedToken]:
    """Return the added tokens: of tokenizer_config.json, or else of tokenizer.json."""
    if decoder is None:
        return dict(backend.get_added_tokens_decoder())
    return {int(index): AddedToken(**token) for index, token in decoder.items()}


def _add_tokens(
    backend: Backend,
    added: Mapping[int, AddedToken],
    named: Mapping[str, AddedToken | str],
    extra: list[AddedToken | str],
) -> None:
    """Add to the vocabulary what it lacks, in the order of the ids, then special tokens."""
    present = backend.get_added_tokens_decoder().values()
    as_present = set(map(repr, present))
    new: list[AddedToken | str] = [
        token for _, token in sorted(added.items()) if repr(token) not in as_present
    ]
    known = {token.content for token in present} | set(map(str, new))
    for token in (*named.values(), *extra):
        if str(token) not in known:
            known.add(str(token))
            new.append(token)
    names = set(map(str, named.values()))
    for token in new:
        if isinstance(token, AddedToken) and str(token) in names:
            token.special = True
    if new:
        backend.add_tokens(
            [AddedToken(each, special=True) if isinstance(each, str) else each for each in new]
        )


def _template(path: Path, template: Any) -> Any:
    """Return the source of the chat template, or the sources of several by name; a file of its own wins."""
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    return template


def _class_of(path: Path, named: Any) -> _Class:
    """Return the class that transformers' AutoTokenizer chooses for a model and the class it names."""
    model = read_settings(path / "config.json")
    _need(not {"tokenizer_class", "model_name"} & model.keys(), "a class in config.json")
    _need(not model.get("_name_or_path", "").lower().startswith(_RENAMED), "the name of another model")
    name = None if named is None else str(named).removesuffix("Fast")
    _need(name in _CLASSES, f"the class {named}")
    model_type = model.get("model_type")
    if model_type == "qwen2":  # whose published files often name a wrong class
        return _QWEN2
    if model_type == "mistral":
        return _PLAIN
    _need(model_type in ("llama", "qwen3"), f"the model type {model_type}")
    if name == "LlamaTokenizer" and '"ByteLevel"' in (path / "tokenizer.json").read_text(encoding="utf-8"):
        return _PLAIN
    return _CLASSES[name] or (_QWEN2 if model_type == "qwen3" else _PLAIN)


def _set_model(model: models.BPE, *, fuse_unk: bool = False, byte_fallback: bool = False) -> None:
    model.dropout = model.unk_token = None
    model.continuing_subword_prefix = model.end_of_word_suffix = ""
    model.fuse_unk, model.byte_fallback, model.ignore_merges = fuse_unk, byte_fallback, False


def _bring_qwen2(backend: Backend, settings: Mapping[str, Any]) -> None:
    _set_model(backend.model)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(
                add_prefix_space=bool(settings.get("add_prefix_space")), use_regex=False
            ),
        ]
    )
    backend.decoder = decoders.ByteLevel()


def _bring_gpt2(backend: Backend, settings: Mapping[str, Any]) -> None:
    _set_model(backend.model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    backend.decoder = decoders.ByteLevel()


def _bring_llama(backend: Backend, settings: Mapping[str, Any]) -> None:
    _set_model(backend.model, fuse_unk=True, byte_fallback=True)
    is_prefixed = settings.get("add_prefix_space") in (None, True)
    scheme = ("always" if settings.get("legacy") else "first") if is_prefixed else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if is_prefixed else steps
    )


_PLAIN = _Class("TokenizersBackend")
_QWEN2 = _Class(
    "Qwen2Tokenizer",
    dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END_OF_TEXT),
    {"add_prefix_space": None, "bos_token": None},
    _bring_qwen2,
)
_GPT2 = _Class(
    "GPT2Tokenizer",
    dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
    {"add_prefix_space": False, "pad_token": None},
    _bring_gpt2,
)
_LLAMA = _Class(
    "LlamaTokenizer",
    {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    {"add_prefix_space": None, "clean_up_tokenization_spaces": False},
    _bring_llama,
)
_CLASSES: dict[str | None, _Class | None] = {
    None: None,  # the model's own
    "PreTrainedTokenizer": _PLAIN,
    "TokenizersBackend": _PLAIN,
    "Qwen2Tokenizer": _QWEN2,
    "GPT2Tokenizer": _GPT2,
    "LlamaTokenizer": _LLAMA,
}
