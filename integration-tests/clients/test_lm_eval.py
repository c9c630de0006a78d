"""lm-eval, unmodified: `local-completions` against our server gives what its own backend `hf` gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served import served

from sagellm.engines.embedded import embedded_model
from sagellm.testing.patience import PATIENCE_S

pytest.importorskip("lm_eval", reason="lm-eval is not installed: hatch run clients:test")

MODEL = embedded_model()
CHOICES = [
    {"text": "The river runs", "choices": [" to the sea.", " to the moon.", " fast"], "label": 0},
    {"text": "Bread needs flour,", "choices": [" water and salt", " and stones"], "label": 0},
    {"text": "She asked whether it was far. It", "choices": [" was not", " is a", " sings."], "label": 0},
]
QUESTIONS = [{"text": "Is it far?\n"}, {"text": "The clock in the station"}, {"text": "Once upon a time"}]
TASKS = {
    "local_choices": """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "local_answers": """
output_type: generate_until
doc_to_target: text
generation_kwargs: {until: ["zzzz"], max_gen_toks: 24, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks and their data, in files: nothing is fetched."""
    folder = tmp_path_factory.mktemp("tasks")
    for (name, task), rows in zip(TASKS.items(), (CHOICES, QUESTIONS), strict=True):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / f"{name}.yaml").write_text(f'{head}test_split: test\ndoc_to_text: "{{{{text}}}}"{task}')
    return folder


def evaluate(model: str, arguments: str, tasks: Path, output: Path) -> dict[str, list[Any]]:
    """Run lm-eval's program and return what the model answered: by task, of each document."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(tasks), "--device", "cpu"]
    command += ["--output_path", str(output), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "cache")}
    environment = {**os.environ, **offline, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = {}
    for name in TASKS:
        (path,) = output.rglob(f"samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["doc_id"])
        answers[name] = [row["resps"] for row in rows]
    return answers


def test_log_likelihoods_and_answers_are_those_of_transformers(tasks: Path, tmp_path: Path) -> None:
    expected = evaluate("hf", f"pretrained={MODEL},dtype=float32", tasks, tmp_path / "hf")
    with served(MODEL, tmp_path) as url:
        arguments = f"model={MODEL},base_url={url}/v1/completions,num_concurrent=2,max_retries=1"
        found = evaluate("local-completions", arguments, tasks, tmp_path / "served")
    pairs = [
        (float(ours[0][0]), float(theirs[0][0]), str(ours[0][1]), str(theirs[0][1]))
        for our_row, their_row in zip(found["local_choices"], expected["local_choices"], strict=True)
        for ours, theirs in zip(our_row, their_row, strict=True)
    ]
    assert len(pairs) == sum(len(row["choices"]) for row in CHOICES)
    for ours, theirs, is_greedy, was_greedy in pairs:
        assert ours == pytest.approx(theirs, abs=1e-3)
        assert is_greedy == was_greedy
    assert found["local_answers"] == expected["local_answers"]
    assert all(row[0][0].strip() for row in found["local_answers"])
