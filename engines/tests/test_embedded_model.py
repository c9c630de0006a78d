"""The embedded model is there, is used where none is named, and answers what it was taught."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.embedded import EMBEDDED, embedded_model
from sagellm.engines.loading.source import resolve_source

WORKSHOP = Path(__file__).parents[1] / "embedded_model"
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)

in_the_repository = pytest.mark.skipif(not WORKSHOP.exists(), reason="the corpus is not in the wheel")


@pytest.fixture(scope="module")
def engine():
    return LLMEngine(num_blocks=256, device="cpu")


def ask(engine, question):
    return engine.chat([{"role": "user", "content": question}], GREEDY)[0].outputs[0]


def test_it_is_small_and_in_the_hugging_face_layout():
    folder = embedded_model()
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert names <= {file.name for file in folder.iterdir()}
    assert sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) <= 10_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] >= 8192


def test_it_is_used_where_no_model_is_named(engine):
    assert engine.config.model.name == EMBEDDED
    assert resolve_source(EMBEDDED) == embedded_model()


def test_a_directory_of_that_name_is_reached_by_its_path(tmp_path, monkeypatch):
    (tmp_path / EMBEDDED).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_source(EMBEDDED) == embedded_model()
    assert resolve_source(f"./{EMBEDDED}").resolve() == tmp_path / EMBEDDED


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is a KV cache?", "keys"),
        ("How many packages does sageLLM have?", "nine"),
        ("What is the capital of France?", "Paris"),
    ],
)
def test_it_answers_and_ends(engine, question, word):
    answer = ask(engine, question)
    assert word in answer.text
    assert answer.finish_reason == "stop"


def test_a_second_turn_finds_the_first_in_the_cache(engine):
    question = {"role": "user", "content": "What is a prefix cache? Please explain it to me at length."}
    first = engine.chat([question], GREEDY)[0]
    turns = [question, {"role": "assistant", "content": first.outputs[0].text}]
    second = engine.chat([*turns, {"role": "user", "content": "Why is it useful?"}], GREEDY)[0]
    assert second.num_cached_tokens >= len(first.prompt_token_ids) // 16 * 16 > 0


def test_its_tokens_equal_those_of_transformers():
    engine = LLMEngine(dtype="float32", num_blocks=256, device="cpu")
    reference = AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32)
    for question in ("What is a KV cache?", "Tell me a story about a fox.", "List four colors."):
        output = engine.chat([{"role": "user", "content": question}], GREEDY)[0]
        prompt = torch.tensor([output.prompt_token_ids])
        tokens = reference.generate(prompt, max_new_tokens=200, do_sample=False)[0, prompt.shape[1] :]
        assert output.outputs[0].token_ids == tokens.tolist()


@in_the_repository
@pytest.mark.full
def test_the_examination_is_passed():
    script = str(WORKSHOP / "score.py")
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # a second one costs
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False, env=one_thread
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["questions"] == 50
    assert report["right"] >= 30
    assert report["examination"]["ended"] >= 0.95
    assert report["drawn"]["ended"] >= 0.95
    assert report["all"]["tokens_p90"] >= 5 * report["all"]["tokens_p10"]


@in_the_repository
def test_training_text_shares_no_six_words_with_the_examination():
    source = (
        "from itertools import islice\n"
        "from corpus.mixture import Mixture, examination_questions, texts_of\n"
        "import re\n"
        "split = lambda text: re.findall('[a-z0-9]+', text.lower())\n"
        "asked = [' ' + ' '.join(split(text)) + ' ' for text in examination_questions()]\n"
        "for sample in islice(Mixture(1, disguised=0.5), 4000):\n"
        "    for text in texts_of(sample):\n"
        "        words = split(text)\n"
        "        for start in range(len(words) - 5):\n"
        "            run = ' ' + ' '.join(words[start:start + 6]) + ' '\n"
        "            assert not any(run in question for question in asked), run\n"
    )
    subprocess.run([sys.executable, "-c", source], cwd=WORKSHOP, timeout=300, check=True)
