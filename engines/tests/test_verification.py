"""Where an answer differs from transformers' greedy one, by how much, and whether that is a tie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sagellm.core import CheckpointError, ConfigError, EngineError, OutOfMemoryError
from sagellm.engines.config.schema import EngineConfig
from sagellm.engines.verification import run
from sagellm.engines.verification.comparison import ComparedPrompt, Difference, Verification
from sagellm.engines.verification.prompts import QUESTIONS, TEXTS, asked_prompts, read_texts
from sagellm.engines.verification.reference import Reference, num_bytes_in

CPU = torch.device("cpu")
PROMPT = [7, 300, 41, 99, 12, 250]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def generated(checkpoint: Path) -> Any:
    """What transformers' `generate` gives, with the logits of each token."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 20, "output_logits": True}
    with torch.inference_mode():
        return model.generate(torch.tensor([PROMPT]), **options, return_dict_in_generate=True)


def test_what_generate_gives_differs_nowhere(reference: Reference, generated: Any) -> None:
    assert reference.differences(PROMPT, generated.sequences[0, len(PROMPT) :].tolist()) == []


def test_a_difference_has_its_place_both_tokens_and_the_distance_of_their_logits(
    reference: Reference, generated: Any
) -> None:
    answer = generated.sequences[0, len(PROMPT) :].tolist()
    logits = generated.logits[7][0]
    second = int(logits.topk(2).indices[1])
    found = reference.differences(PROMPT, [*answer[:7], second, *answer[8:]])
    assert (found[0].place, found[0].token_id, found[0].reference_token_id) == (7, second, answer[7])
    assert found[0].margin == pytest.approx(float(logits[answer[7]] - logits[second]), abs=1e-4)


def difference(place: int, margin: float) -> Difference:
    return Difference(
        place=place, token_id=1, reference_token_id=2, logprob=-1.0 - margin, reference_logprob=-1.0
    )


@pytest.mark.parametrize(
    ("margins", "verdict", "place"),
    [
        ([], "equal", None),
        ([0.0005, 0.0002], "ties", 0),
        ([0.0005, 0.01, 2.0], "different", 1),  # the first that is no tie tells
        ([0.002], "different", 0),
    ],
)
def test_a_difference_below_the_margin_is_a_tie(margins: list[float], verdict: str, place: int) -> None:
    differences = [difference(number, margin) for number, margin in enumerate(margins)]
    prompt = ComparedPrompt(text="", num_prompt_tokens=3, token_ids=[1] * 8, differences=differences)
    decisive = prompt.decisive(0.001)
    assert (decisive and decisive.place) == place
    equal = ComparedPrompt(text="", num_prompt_tokens=3, token_ids=[1] * 2, differences=[])
    found = Verification(prompts=[equal, prompt], tie_margin=0.001, is_lossy=False)
    assert (found.verdicts, found.verdict) == (["equal", verdict], verdict)
    assert found.agreement_share == pytest.approx(1 - len(margins) / 10)
    assert found.mean_margin == pytest.approx(sum(margins) / 10)


def test_its_own_prompts_fit_into_the_models_context(make_engine: Any) -> None:
    engine = make_engine(max_model_len=100)
    prompts = asked_prompts(engine, None, is_raw=True, max_tokens=30)
    assert [each.text for each in prompts] == list(TEXTS)
    assert max(len(each.token_ids) for each in prompts) == 70
    answers = run.take_answers(engine, prompts, max_tokens=30)
    assert {len(answer) for answer in answers.token_ids} == {30}


def test_a_given_prompt_that_leaves_no_room_for_an_answer_is_named(make_engine: Any) -> None:
    engine = make_engine(max_model_len=16)
    with pytest.raises(ConfigError, match=r"prompt 2 has \d+ tokens; the model's context is 16, .*word word"):
        asked_prompts(engine, ["a", "word " * 40], is_raw=True, max_tokens=4)


def test_a_model_with_a_chat_template_is_asked_through_it(make_engine: Any) -> None:
    engine = make_engine()
    assert engine.chat_template.exists
    raw, asked = (asked_prompts(engine, ["Hello"], is_raw=raw, max_tokens=1)[0] for raw in (True, False))
    assert len(asked.token_ids) > len(raw.token_ids)
    assert [each.text for each in asked_prompts(engine, None, is_raw=False, max_tokens=1)] == [
        *TEXTS,
        *QUESTIONS,
    ]


def test_a_file_of_prompts_has_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("One\n\n  \nTwo 🌊\n", encoding="utf-8")
    assert read_texts(tmp_path / "prompts.txt") == ["One", "Two 🌊"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory"),
        (b" \n\n", "holds no prompt; write one a line"),
        (b"\xff\xfe\n", "cannot be read: it is not UTF-8"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_texts(path)


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (ValueError("no such class"), CheckpointError, "so there is nothing to compare with: no such class"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemoryError, "--dtype bfloat16"),
    ],
)
def test_a_checkpoint_that_transformers_cannot_load_is_an_error_that_says_why(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(expected, match=words):
        Reference(checkpoint, dtype=torch.float32, device=CPU)


def test_a_reference_that_overflows_is_an_error(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_logprobs", lambda *_: torch.full((2, 5), float("nan")))
    with pytest.raises(EngineError, match="not finite in float32"):
        reference.differences(PROMPT, [1, 2])


def test_a_model_larger_than_the_free_memory_is_said_before_it_is_loaded(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    prompts = asked_prompts(engine, ["Hello"], is_raw=True, max_tokens=1)
    answers = run.take_answers(engine, prompts, max_tokens=1)
    said: list[str] = []
    run.reference_of(answers, said.append)
    assert not said
    monkeypatch.setattr(run, "available_memory_bytes", lambda _: 1024)
    run.reference_of(answers, said.append)
    assert said[0].startswith("transformers needs")
    assert "1 KiB are available on cpu" in said[0]


def test_a_checkpoint_is_as_large_as_its_parameters(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert num_bytes_in(checkpoint, torch.bfloat16) == 2 * model.num_parameters()


@pytest.mark.parametrize(
    ("settings", "is_lossy"),
    [
        ({"kv.dtype": "float32"}, False),
        ({"kv.dtype": "int8"}, True),
        ({"kv.dtype": "float32", "model.quantization": "int8"}, True),
        ({"kv.dtype": "float32", "model.sparsity": "2:4"}, True),
    ],
)
def test_fewer_bits_for_weights_or_kv_are_lossy(settings: dict[str, str], is_lossy: bool) -> None:
    config = EngineConfig().with_values({"model.dtype": "float32", **settings})
    answers = run.Answers(config=config, prompts=[], token_ids=[], tokenizer=None)
    assert answers.is_lossy is is_lossy
