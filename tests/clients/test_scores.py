"""lm-eval's score of a model that the server runs, beside its score of the same values in float32.

The questions are those of MMLU that lm-eval's package ships as examples; their answers' texts are scored.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("starlette")

import ondevice
from tests.clients.process import served
from tests.clients.programs import PROGRAMS
from tests.support.real_models import real_model

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(3600)]

QUESTIONS, PER_SUBJECT = 100, 2
WITHIN = 1
"""Most questions by which the two scores may differ: a point."""
EXAMPLES = "lib/python*/site-packages/lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"
QUESTION = re.compile(
    r"Q: (.+?)\n\(A\) (.+?) \(B\) (.+?) \(C\) (.+?) \(D\) (.+?)\nA: .*?answer is \(([A-D])\)", re.DOTALL
)
TASK = """
task: questions
dataset_path: json
dataset_kwargs: {data_files: {test: questions.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def write_task(folder: Path, examples: Path) -> None:
    """Two questions of each subject in turn, the first 100, and lm-eval's description of them."""
    found = []
    for _, text in sorted(json.loads(examples.read_text(encoding="utf-8")).items()):
        asked = (match for block in text.split("\n\n") if (match := QUESTION.match(block)))
        for match in islice(asked, PER_SUBJECT):
            question, *choices, right = match.groups()
            found.append({"question": question, "choices": choices, "answer": "ABCD".index(right)})
    assert len(found) >= QUESTIONS
    (folder / "questions.json").write_text("\n".join(map(json.dumps, found[:QUESTIONS])))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "questions.yaml").write_text(TASK)


def right_answers(python: Path, folder: Path, model: str, arguments: Mapping[str, object]) -> dict[str, int]:
    """How many questions lm-eval counts as right, by metric."""
    told = ",".join(f"{name}={value}" for name, value in arguments.items())
    flags = ["--model", model, "--model_args", told, "--tasks", "questions", "--include_path", "tasks"]
    # `transformers` and PyTorch are those of the tests.
    environment = {"PYTHONPATH": sysconfig.get_path("purelib"), "OPENAI_API_KEY": "none"}
    environment |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-m", "lm_eval", *flags, "--output_path", model],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = (folder / model).rglob("results_*.json")
    scores = json.loads(path.read_text())["results"]["questions"]
    return {metric: round(QUESTIONS * scores[f"{metric},none"]) for metric in ("acc", "acc_norm")}


def test_lm_evals_score_is_that_of_float32(tmp_path: Path) -> None:
    python = PROGRAMS["lm-eval"].path
    if python is None:
        pytest.skip("lm-eval isn't installed: `python -m tests.clients.install lm-eval`")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    (examples,) = PROGRAMS["lm-eval"].folder.glob(EXAMPLES)
    write_task(tmp_path, examples)
    file = real_model("smollm2")
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(
        tmp_path / "tokenizer"
    )
    where = {"pretrained": file.parent, "gguf_file": file.name, "dtype": "float32"}
    theirs = right_answers(python, tmp_path, "hf", where)
    bundle = ondevice.convert(file, tmp_path / "smollm2")
    with served(bundle, tmp_path / "log.jsonl") as server:
        where = {"model": bundle.name, "base_url": f"{server.url}/v1/completions", "num_concurrent": 1}
        where |= {"tokenizer_backend": "huggingface", "tokenizer": tmp_path / "tokenizer"}
        ours = right_answers(python, tmp_path, "local-completions", where)
    print(f"of {QUESTIONS}: {ours} here, {theirs} in float32")
    assert all(abs(ours[metric] - theirs[metric]) <= WITHIN for metric in ours), (ours, theirs)
