"""What a checkpoint says about generating with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from sagellm.core import CheckpointError, HFConfig, InvalidRequestError, ModelGeometry, get_logger
from sagellm.engines.config.shown import shown
from sagellm.engines.sampling.params import SamplingParams

logger = get_logger(__name__)

NAMES_IN_FILE = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
"""How the file names parameters that requests name otherwise."""
_FILE = "generation_config.json"
_MAX_BAD_TOKENS = 8192  # of all words; each request carries them
_DEFAULT_MAX_LENGTH = 20  # transformers writes it where nothing was chosen
# Not listed: settings with no effect without beam search (length_penalty, early_stopping, diversity_penalty)
# or at all (renormalize_logits), and those that affect only speed or the output format.
_NOT_APPLIED: dict[str, object] = {
    "begin_suppress_tokens": [],
    "constraints": [],
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "force_words_ids": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "max_time": None,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0,
    "sequence_bias": [],
    "token_healing": False,
    "watermarking_config": None,
}
"""Settings of transformers that have no equivalent here, each with the value that changes nothing."""
_NOT_APPLIED_TO_SAMPLES: dict[str, object] = {
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "typical_p": 1,
}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """The checkpoint's own settings, named as those of `SamplingParams`; None or empty where it has none.

    Greedy is a temperature of 0.
    """

    eos_token_ids: frozenset[int] = frozenset()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def read(
        cls, generation_config: Mapping[str, Any], config: HFConfig, sizes: ModelGeometry
    ) -> GenerationDefaults:
        """Read generation_config.json; if it has no end-of-text tokens, they come from config.json.

        There they may be part of the text model's config, as in transformers. Logs once what is not applied.
        """
        eos_token_ids = _eos_token_ids(generation_config, config)
        is_greedy = generation_config.get("do_sample") is False
        _warn_of_rest(generation_config, sizes, is_greedy=is_greedy)
        most, least = (_integer(generation_config, f"{end}_new_tokens") for end in ("max", "min"))
        return cls(
            eos_token_ids=eos_token_ids,
            temperature=0.0 if is_greedy else _number(generation_config, "temperature"),
            top_k=_integer(generation_config, "top_k"),
            top_p=_number(generation_config, "top_p"),
            min_p=_number(generation_config, "min_p"),
            repetition_penalty=_number(generation_config, "repetition_penalty"),
            max_tokens=most,
            min_tokens=least if most is None or least is None else min(least, most),
            stop=_texts(generation_config, "stop_strings"),
            bad_words_token_ids=_bad_words(generation_config, eos_token_ids, sizes.vocab_size),
        )

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of a request that the checkpoint sets."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        del values["eos_token_ids"]
        return {name: value for name, value in values.items() if value not in (None, ())}

    def checked_params(self) -> dict[str, Any]:
        """Return `params`. Raises CheckpointError for a value that a request must not have."""
        try:
            SamplingParams(**self.params)
        except InvalidRequestError as error:
            name, _, told = str(error).partition(" ")
            raise CheckpointError(f"{_FILE}: {NAMES_IN_FILE.get(name, name)} {told}") from error
        return self.params


def _eos_token_ids(generation_config: Mapping[str, Any], config: HFConfig) -> frozenset[int]:
    text = config.get("text_config")
    sources: dict[str, Mapping[str, Any]] = {
        f"{_FILE}: eos_token_id": generation_config,
        "config.json: eos_token_id": config,
        "config.json: text_config.eos_token_id": text if isinstance(text, Mapping) else {},
    }
    found = ((key, source.get("eos_token_id")) for key, source in sources.items())
    key, eos = next((each for each in found if each[1] is not None), ("", None))
    return _token_ids(key, eos)


def _warn_of_rest(values: Mapping[str, Any], sizes: ModelGeometry, *, is_greedy: bool) -> None:
    """Name the settings that would change the output in transformers and change nothing here."""
    without_effect = _NOT_APPLIED | ({} if is_greedy else _NOT_APPLIED_TO_SAMPLES)
    rest = [name for name, off in without_effect.items() if values.get(name) not in (None, off)]
    length = values.get("max_length")
    is_limit = isinstance(length, int) and _DEFAULT_MAX_LENGTH != length < sizes.max_model_len
    if is_limit and values.get("max_new_tokens") is None:
        rest.append("max_length")
    if rest:
        logger.warning(
            "%s sets %s, which this engine does not apply; in transformers they change the output",
            _FILE,
            ", ".join(f"{name}={shown(values[name])}" for name in rest),
        )


def _texts(values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = values.get(name)
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{_FILE}: {name} is {shown(value)}; it must be a text or a list of texts")
    return tuple(texts)


def _bad_words(
    values: Mapping[str, Any], eos_token_ids: frozenset[int], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that are not generated.

    As in transformers, an end of sequence is not a bad word. Those with a token that the model lacks cannot
    be generated anyway.
    """
    words = [[token] for token in _list(values, "suppress_tokens", int)]
    for word in _list(values, "bad_words_ids", list):
        if not word or not all(type(token) is int for token in word):
            raise CheckpointError(
                f"{_FILE}: bad_words_ids has {shown(word)}; it must hold lists of token ids"
            )
        if len(word) > 1 or word[0] not in eos_token_ids:
            words.append(word)
    if (num_tokens := sum(map(len, words))) > _MAX_BAD_TOKENS:
        raise CheckpointError(
            f"{_FILE}: bad_words_ids and suppress_tokens have {num_tokens:,} tokens; there may be at most "
            f"{_MAX_BAD_TOKENS:,}"
        )
    known = [tuple(word) for word in words if all(0 <= token < vocab_size for token in word)]
    return tuple(dict.fromkeys(known))


def _list(values: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = values.get(name)
    if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
        wanted = "token ids" if kind is int else "lists of token ids"
        raise CheckpointError(f"{_FILE}: {name} is {shown(value)}; it must be a list of {wanted}")
    return value or []


def _token_ids(key: str, value: Any) -> frozenset[int]:
    ids = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    ids = [token for token in ids if token is not None]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"{key} is {shown(value)}; it must be a token id or a list of them")
    return frozenset(ids)


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = _checked(values, name, "number")
    try:
        return None if value is None else float(value)
    except OverflowError:
        raise CheckpointError(f"{_FILE}: {name} is too large for a float") from None


def _integer(values: Mapping[str, Any], name: str) -> int | None:
    value = _checked(values, name, "integer")
    return None if value is None else int(value)


def _checked(values: Mapping[str, Any], name: str, kind: Literal["number", "integer"]) -> float | None:
    value = values.get(name)
    wanted = int if kind == "integer" else int | float
    if value is not None and (isinstance(value, bool) or not isinstance(value, wanted)):
        raise CheckpointError(f"{_FILE}: {name} is {shown(value)}; it must be a {kind}")
    return value
