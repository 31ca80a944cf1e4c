"""lm-eval-harness with a cache format: tasks in the layout of its own YAML files, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'nibblekv[eval]'")

import lm_eval
from lm_eval.api.registry import get_model
from tiny_models import save_tiny_model
from transformers import AutoTokenizer

from nibblekv.integrations.lm_eval import FormatLM, main
from nibblekv.models import load_model
from nibblekv.peers import cache_argument, cache_maker

# What gsm8k's file says, with local data in place of the hub's.
GENERATE = """\
task: tiny_generate
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: generate_until
test_split: test
doc_to_text: "the people of {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
generation_kwargs:
  max_gen_toks: 12
  until:
    - "Question:"
  do_sample: false
filter_list:
  - name: "first-word"
    filter:
      - function: "regex"
        regex_pattern: "(\\\\w+)"
      - function: "take_first"
metadata:
  version: 1.0
"""
CHOOSE = """\
task: tiny_choose
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "and it came to pass that all the people of {{{{question}}}} said"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""
WORDS = ("house", "land", "city", "king", "sea")
CHOICES = ["the man", "the woman", "a day"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token = "<bos>"  # lm-eval ends every answer at one
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def tasks(folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks; the right answer of the generation task is what the unquantized model writes first."""
    model, tokenizer = load_model(folder, torch.float32)
    path = tmp_path_factory.mktemp("tasks")
    rows = []
    for word in WORDS:
        inputs = tokenizer(f"the people of {word}", return_tensors="pt", return_token_type_ids=False)
        out = model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)
        rows.append({"question": word, "answer": tokenizer.decode(out[0, -1:]), "choices": CHOICES})
    data = path / "test.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
        (path / f"{name}.yaml").write_text(text.format(data=data))
    return path


@pytest.fixture(autouse=True)
def local_only(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def evaluate(folder: str, tasks: Path, name: str, format: str, batch_size: int = 2) -> dict:
    found = lm_eval.simple_evaluate(
        model="nibblekv",
        model_args={"pretrained": folder, "format": format, "device": "cpu", "dtype": "float32"},
        tasks=[name],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=batch_size,
        bootstrap_iters=0,
    )
    assert found["results"][name]
    return found


def test_a_generation_task_runs_with_a_format(folder, tasks):
    """Catches a cache that is not passed on, or shared by two requests."""
    plain = evaluate(folder, tasks, "tiny_generate", "none")
    assert plain["results"]["tiny_generate"]["exact_match,first-word"] == 1
    # In a batch, sums in another order move codes by one, and a random model then soon writes another text.
    packed = evaluate(folder, tasks, "tiny_generate", "int4", batch_size=1)
    model, tokenizer = load_model(folder, torch.float32)
    for sample in packed["samples"]["tiny_generate"]:
        inputs = tokenizer(sample["arguments"][0][0], return_tensors="pt", return_token_type_ids=False)
        with cache_maker(model, "int4", strict=True) as make_cache:
            out = model.generate(
                **inputs, **cache_argument(model, make_cache()), max_new_tokens=12, do_sample=False, pad_token_id=0
            )
        assert sample["resps"][0][0] == tokenizer.decode(out[0, inputs.input_ids.shape[1] :])


@pytest.mark.parametrize("format", ["none", "int4"])
def test_given_answers_are_scored_with_the_stored_keys(folder, tasks, format):
    """Catches scores of the raw prompt, which are the unquantized model's."""
    found = evaluate(folder, tasks, "tiny_choose", format)
    model, tokenizer = load_model(folder, torch.float32)
    differs = 0.0
    for sample in found["samples"]["tiny_choose"]:
        for (context, choice), ((score, _),) in zip(sample["arguments"], sample["resps"], strict=True):
            begin = tokenizer(context, return_tensors="pt").input_ids.shape[1]
            tokens = tokenizer(context + choice, return_tensors="pt").input_ids
            scores = []
            for name in ("none", format):
                with torch.no_grad(), cache_maker(model, name, strict=True) as make_cache:
                    logits = model(tokens[:, :-1], **cache_argument(model, make_cache())).logits[0]
                chosen = logits.log_softmax(-1)[begin - 1 :].gather(1, tokens[0, begin:, None])
                scores.append(float(chosen.sum()))
            assert float(score) == pytest.approx(scores[1], abs=1e-3)
            differs += abs(scores[0] - scores[1])
    assert (differs > 0.05) == (format == "int4")


def test_the_command_line_is_that_of_lm_eval(monkeypatch):
    """Catches a module that runs without its model being known."""
    seen = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.append(get_model("nibblekv")))
    main()
    assert seen == [FormatLM]


def test_unknown_formats_are_refused_before_the_model_is_loaded():
    with pytest.raises(ValueError, match="format: expected one of int4"):
        FormatLM("/no/such/model", format="int5")
