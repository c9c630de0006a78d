"""The embedded model's tokenizer and chat template, and samples as token ids with what is to be learnt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
from corpus.mixture import Mixture, texts_of
from corpus.sample import Passage, Sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, BEGIN_TURN, END_TURN, "<tool_call>", "</tool_call>"]

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nYou may call these functions:\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{%- set call = call.function if call.function is defined else call %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LEARNT = re.compile(r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>", re.DOTALL)


def train_tokenizer(vocab_size: int, *, num_samples: int = 30_000, seed: int = 0) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the corpus; digits are tokens of their own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=4,
        show_progress=False,
    )
    samples = islice(Mixture(seed), num_samples)
    tokenizer.train_from_iterator((text for sample in samples for text in _spoken(sample)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TURN,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _spoken(sample: Sample) -> list[str]:
    """Every text of a sample that the template puts between special tokens."""
    if isinstance(sample, Passage):
        return texts_of(sample)
    calls = [json.dumps(call) for message in sample.messages for call in message.tool_calls]
    return [*texts_of(sample), *map(json.dumps, sample.tools), *calls]


def render(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> str:
    """Write a sample as the text that the model sees."""
    if isinstance(sample, Passage):
        return sample.text + END_OF_TEXT
    messages = [
        {"role": m.role, "content": m.content} | ({"tool_calls": list(m.tool_calls)} if m.tool_calls else {})
        for m in sample.messages
    ]
    tools = list(sample.tools) or None
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def encode(samples: Iterable[Sample], tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids (tokens,) int16 and which of them are learnt (tokens,) bool, one sample after another.

    Of a dialogue the assistant's turns are learnt, with the token that ends them; of a passage all.
    """
    ids: list[np.ndarray] = []
    learnt: list[np.ndarray] = []
    batch = [(sample, render(sample, tokenizer)) for sample in samples]
    encoded = tokenizer.backend_tokenizer.encode_batch([text for _, text in batch], add_special_tokens=False)
    for (sample, text), encoding in zip(batch, encoded, strict=True):
        ids.append(np.array(encoding.ids, np.int16))
        starts = np.array([start for start, _ in encoding.offsets])
        if isinstance(sample, Passage):
            mask = np.ones(len(starts), bool)
        else:
            mask = np.zeros(len(starts), bool)
            for span in LEARNT.finditer(text):
                mask |= (starts >= span.start()) & (starts < span.end())
        learnt.append(mask)
    return np.concatenate(ids), np.concatenate(learnt)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, *, max_length: int) -> None:
    """Write the tokenizer's files, with its vocabulary and merges as compact as they go."""
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), ensure_ascii=False))
