"""Examines the embedded model: `python engines/embedded_model/score.py [MODEL]`.

Fifty questions that share no run of six words with the training text are asked, one dialogue each, with
greedy decoding. Printed are how many answers hold the right key word, how many end by themselves, and
how much their lengths vary; the same for 200 questions drawn as the training text is.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from itertools import islice, takewhile
from typing import Any

import numpy as np
from corpus.mixture import EXAMINATION, Mixture
from corpus.sample import Dialogue

from sagellm.engines import LLMEngine, RequestOutput, SamplingParams
from sagellm.engines.embedded import EMBEDDED

MAX_TOKENS = 600


def ask(engine: LLMEngine, dialogues: list[list[dict[str, str]]], temperature: float) -> list[RequestOutput]:
    """Answer the last turn of each dialogue."""
    assert engine.tokenizer is not None
    prompts = [
        engine.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for messages in dialogues
    ]
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=0, max_tokens=MAX_TOKENS)
    return engine.generate(prompts, params, progress=True)


def drawn(num: int, seed: int) -> list[list[dict[str, str]]]:
    """Draw conversations from the corpus up to their first answer, with a seed that training does not use."""
    samples = (sample for sample in Mixture(seed) if isinstance(sample, Dialogue) and not sample.tools)
    return [
        [
            {"role": message.role, "content": message.content}
            for message in takewhile(lambda message: message.role != "assistant", sample.messages)
        ]
        for sample in islice(samples, num)
    ]


def summarise(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Return the share that ended by itself and the 10th, 50th and 90th percentile of the lengths."""
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    ended = sum(output.outputs[0].finish_reason == "stop" for output in outputs)
    low, median, high = (float(np.percentile(lengths, p)) for p in (10, 50, 90))
    return {"ended": ended / len(outputs), "tokens_p10": low, "tokens_p50": median, "tokens_p90": high}


def main() -> None:
    """Ask, compare, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=EMBEDDED)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--show", action="store_true", help="print every answer")
    options = parser.parse_args()
    engine = LLMEngine(model=options.model, dtype="float32", num_blocks=4096)
    questions = json.loads(EXAMINATION.read_text(encoding="utf-8"))
    asked = [[{"role": "user", "content": entry["question"]}] for entry in questions]
    outputs = ask(engine, asked, options.temperature)
    right = 0
    for entry, output in zip(questions, outputs, strict=True):
        text = output.outputs[0].text
        is_right = any(re.search(rf"\b{re.escape(key)}", text, re.IGNORECASE) for key in entry["keywords"])
        right += is_right
        if options.show:
            print(f"{'+' if is_right else '-'} {entry['question']}\n    {text}\n")
    others = ask(engine, drawn(200, seed=random.Random("examination").getrandbits(32)), options.temperature)
    report = {
        "right": right,
        "questions": len(questions),
        "examination": summarise(outputs),
        "drawn": summarise(others),
        "all": summarise([*outputs, *others]),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
