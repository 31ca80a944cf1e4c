"""The fidelity report: sheets of questions, the measurement on a tiny model, and the page that is drawn from its JSON."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from tiny_models import save_tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from nibblekv import answers, report
from nibblekv.answers import THINGS, UNSCORED, Sheet, load_questions, needle_sheet, question_sheet, right_answers
from nibblekv.cli.app import app
from nibblekv.evaluation import TEXTS
from nibblekv.generation import generate_tokens
from nibblekv.models import load_model
from nibblekv.peers import cache_maker
from nibblekv.report import Sizes, measure
from nibblekv.report_page import PAGE, RECORD, render

PLOTS = ("glance", "divergence", "position", "needles", "continuations")
SMALL = Sizes(
    windows=2, window=96, copies=1, contexts=(160, 320, 8192), needles=5, sheets=3, question_orders=1, prompts=2, prompt=32,
    new_tokens=20,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def tiny(folder):
    return load_model(folder, torch.float32)


@pytest.fixture(scope="module")
def measured(tiny) -> dict:
    torch.set_num_threads(1)
    return measure(*tiny, ["int4", "int4+w8s4", "int8_per_token_head"], SMALL, model_name="tiny")


@pytest.fixture(scope="module")
def record(measured) -> dict:
    machine = {"cpu": "a processor", "cores": 2, "threads": 1, "gpus": [], "packages": {"torch": "2.0"}}
    return {"command": "nibblekv report tiny", "machine": machine, **measured}


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """One token per byte: what stands in a sheet can be read back exactly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_needles_lie_spread_in_the_text_and_are_all_asked_for(letters):
    """Catches answers that stand nowhere, twice, or where the window still sees them."""
    sheet = needle_sheet(letters, 6000, num_needles=20, seed=3)
    assert 5000 < len(sheet.tokens) <= 6000
    text = letters.decode(sheet.tokens)
    book, asked = text.split("\n\n")
    needles = dict(re.findall(r"Note: (\w+) (\d{4})\.", book))
    assert len(needles) == 20
    assert set(needles) <= set(THINGS)
    questions = re.findall(r"Note: (\w+) (\d{4})", asked)
    assert dict(questions) == needles
    assert [thing for thing, _ in questions] != list(needles)
    assert [letters.decode(sheet.tokens[b:e]) for b, e in sheet.answers] == [number for _, number in questions[UNSCORED:]]
    places = [book.index(f"Note: {thing} ") / len(book) for thing in needles]
    assert places == sorted(places)
    assert max(b - a for a, b in zip([0, *places], [*places, 1], strict=True)) < 0.25
    assert torch.equal(sheet.tokens, needle_sheet(letters, 6000, num_needles=20, seed=3).tokens)
    assert not torch.equal(sheet.tokens[:5000], needle_sheet(letters, 6000, num_needles=20, seed=4).tokens[:5000])


def test_impossible_needles_are_refused(letters, monkeypatch):
    with pytest.raises(ValueError, match="needles: expected 5 to 64, got 4"):
        needle_sheet(letters, 6000, num_needles=4)
    with pytest.raises(ValueError, match=r"context: expected at least \d+ tokens for 20 needles, got 500"):
        needle_sheet(letters, 500, num_needles=20)
    monkeypatch.setattr(answers, "_sentences", lambda: ("A short book.",) * 30)
    with pytest.raises(ValueError, match=r"context: expected less than the \d+ tokens of the texts, got 6000"):
        needle_sheet(letters, 6000, num_needles=20)


def test_questions_are_asked_in_an_order_of_their_own(letters):
    questions = {row["question"]: row["answer"] for row in load_questions()}
    sheet, other = question_sheet(letters, 0), question_sheet(letters, 1)
    assert len(questions) == 64
    assert len(sheet.answers) == 60
    assert len(sheet.tokens) % 2 == 0
    asked = re.findall(r"Q: (.*)\nA: (.*)", letters.decode(sheet.tokens))
    assert dict(asked) == questions
    assert [letters.decode(sheet.tokens[b:e]) for b, e in sheet.answers] == [answer for _, answer in asked[UNSCORED:]]
    assert not torch.equal(sheet.tokens, other.tokens)


@pytest.mark.parametrize("format", ["none", "int4"])
def test_right_answers_are_those_that_greedy_decoding_writes(tiny, format):
    """Catches scores that are shifted by a token, and an answer that counts as right by its last token alone."""
    model, tokenizer = tiny
    prompt = tokenizer("the people of the land", return_tensors="pt").input_ids
    with cache_maker(model, format, strict=True) as make_cache:
        tokens = generate_tokens(model, prompt, make_cache(), max_new_tokens=30, min_new_tokens=30)[0]
    begin = prompt.shape[1]
    spans = [(begin, begin + 3), (begin + 10, begin + 11), (begin + 20, begin + 23), (begin + 26, begin + 29)]
    assert right_answers(model, format, Sheet(tokens, spans)) == [True] * 4
    tokens = tokens.clone()
    tokens[begin + 20] = (tokens[begin + 20] + 1) % 300
    assert right_answers(model, format, Sheet(tokens, spans))[:3] == [True, True, False]


def test_every_format_is_measured_on_every_task(measured):
    """Catches a task that a format is left out of, or that compares a format with itself."""
    assert measured["sizes"]["contexts"] == [160, 320]  # the tiny model has 4,096 positions
    assert measured["limit"] == 4096
    assert list(measured["seconds"]) == ["texts", "needles", "questions", "continuations"]
    assert measured["quoted"] is None
    plain, four, windowed, eight = measured["rows"]
    assert [row["format"] for row in measured["rows"]] == ["none", "int4", "int4+w8s4", "int8_per_token_head"]
    assert plain["bits_held"] == 16
    assert four["bits_held"] == four["bits_per_value"] == 8 * (32 // 2 + 4) / 32
    assert windowed["bits_held"] == pytest.approx(four["bits_held"] + 16 * (8 + 32 + 4) / 320)
    for row in measured["rows"]:
        asked = [(found["context"], found["asked"]) for found in row["needles"]]
        assert asked == [(160, 2 * (5 - UNSCORED)), (320, 5 - UNSCORED)]
        assert row["questions"]["asked"] == 60
        assert 0 <= row["questions"]["right"] <= 60
        assert len(row["by_position"]) == report.POSITION_BINS
        positions = [part["position"] for part in row["by_position"]]
        assert 96 // 4 <= positions[0] < positions[-1] < 95
        assert sum(part["kl_mean"] for part in row["by_position"]) / report.POSITION_BINS == pytest.approx(
            row["kl_mean"], rel=0.1, abs=1e-9
        )
    assert plain["continuations"] == {"divergence": [20, 20], "agreement": [1.0] * report.STEP_BINS}
    assert 0 < eight["kl_mean"] < windowed["kl_mean"] < four["kl_mean"]


def test_continuations_are_compared_token_by_token():
    """Catches agreement that stops at the first difference, and a difference that is counted one step late."""
    same = torch.tensor([[True] * 32, [True] * 3 + [False] + [True] * 28])
    assert report._compare(same) == {"divergence": [32, 3], "agreement": [1.0, 0.75, *[1.0] * 14]}


def test_contexts_beyond_the_model_are_refused_where_none_is_left(tiny):
    with pytest.raises(ValueError, match=r"contexts: expected one of at most the model's 4096 positions, got \(8192,\)"):
        measure(*tiny, ["int4"], Sizes(contexts=(8192,)), model_name="tiny")
    for size in ({"question_orders": 0}, {"contexts": ()}, {"contexts": (1024, 0)}):
        with pytest.raises(ValueError, match=f"{next(iter(size))}: expected at least 1"):
            Sizes(**size)
    with pytest.raises(ValueError, match="format: expected one of"):
        measure(*tiny, ["int5"], SMALL, model_name="tiny")


def test_the_page_says_what_the_record_says(record, tmp_path):
    """Catches a table whose columns or rows are shifted, and pictures that lack a format."""
    paths = render(record, tmp_path)
    assert [path.name for path in paths] == [PAGE, *(f"{name}.svg" for name in PLOTS)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    text = paths[0].read_text()
    for row in record["rows"]:
        (cells,) = re.findall(rf"^\| `{re.escape(row['format'])}` \| (.*{row['kl_p999']:.3f}.*) \|$", text, re.MULTILINE)
        found = cells.split(" | ")
        assert found[:4] == [
            f"{row['bits_held']:.2f}",
            f"{row['kl_mean']:.4f}",
            f"{row['kl_median']:.4f}",
            f"{row['kl_p99']:.3f}",
        ]
        assert found[5:9] == [
            f"{row['top1']:.1%}",
            f"{row['copy_correct']:.1%}",
            f"{sum(n['right'] for n in row['needles']) / 3:.1%}",
            f"{row['questions']['right'] / 60:.1%}",
        ]
    assert re.search(r"^\| `none` .* \| never \|$", text, re.MULTILINE)
    assert "`nibblekv report tiny`" in text
    assert "a processor, 1 threads of 2 cores; torch 2.0" in text
    for name in PLOTS:
        assert f"]({name}.svg)" in text
        svg = (tmp_path / f"{name}.svg").read_text()
        ElementTree.fromstring(svg)
        assert len(svg) < 100_000
        for row in record["rows"][1:]:
            assert f">{row['format']}</text>" in svg, name


def test_the_first_picture_shows_the_best_small_format(record, tmp_path):
    """Catches a headline about an 8-bit or a foreign cache, or with another row's figures."""
    best = next(row for row in record["rows"] if row["format"] == "int4")
    rows = [dict(row) for row in record["rows"]]
    for row, top1 in zip(rows, (1.0, 0.91, 0.8, 0.999), strict=True):
        row["top1"] = top1
    rows.append({**rows[1], "format": "hf-quanto", "top1": 0.95})
    render({**record, "rows": rows}, tmp_path)
    share = best["bits_held"] / 16
    sentence = f"tiny with int4: {share:.0%} of the memory, 91 of 100 next words the same"
    assert sentence in (tmp_path / PAGE).read_text()
    svg = (tmp_path / "glance.svg").read_text()
    assert sentence in svg
    assert ">9.0%</text>" in svg
    assert ">hf-quanto</text>" in svg


def test_refused_formats_and_quoted_figures_are_told(record, tmp_path):
    rows = [*record["rows"], {"model": "tiny", "format": "hf-hqq", "note": "no such package"}]
    quoted = {"source": "another program", "rows": [{"format": "other q4", "bits_per_value": 4.5, "kl_mean": 0.05}]}
    render({**record, "rows": rows, "quoted": quoted}, tmp_path)
    text = (tmp_path / PAGE).read_text()
    assert "- `hf-hqq` was not measured: no such package" in text
    assert "another program" in text
    assert ">other q4</text>" in (tmp_path / "divergence.svg").read_text()


def test_a_format_that_fails_in_a_task_keeps_its_other_figures(tiny, tmp_path, monkeypatch):
    """Catches one cache's limit that costs all others the figures of a long run, and a total over fewer contexts."""
    ask = report.right_answers

    def limited(model, format, sheet):
        if format == "int4" and len(sheet.tokens) > 200:
            raise RuntimeError("no room\nand more")
        return ask(model, format, sheet)

    monkeypatch.setattr(report, "right_answers", limited)
    found = measure(*tiny, ["int4"], SMALL, model_name="tiny")
    plain, four = found["rows"]
    assert four["failures"] == ["needles at 320: no room", "questions: no room"]
    assert [n["context"] for n in four["needles"]] == [160]
    assert "questions" not in four
    assert "failures" not in plain
    del four["continuations"]
    machine = {"cpu": "a processor", "cores": 2, "threads": 1, "gpus": [], "packages": {}}
    render({"command": "nibblekv report tiny", "machine": machine, **found}, tmp_path)
    text = (tmp_path / PAGE).read_text()
    assert "- `int4` failed in questions: no room" in text
    assert re.search(r"^\| `int4` \| 5.00 .* \| - \| - \| - \| - \|$", text, re.MULTILINE)
    assert re.search(r"^\| `int4` \| [\d.]+% \| - \| - \| 2 \|$", text, re.MULTILINE)


def test_a_late_failure_of_the_unquantized_cache_costs_no_figures(tiny, tmp_path, monkeypatch):
    """Catches hours of other formats' figures that go with the one cache that is the largest, or with the process."""
    ask, go_on = report.right_answers, report._continue

    def limited(model, format, sheet):
        if format == "none" and len(sheet.tokens) > 200:
            raise RuntimeError("no room")
        return ask(model, format, sheet)

    def stopped(model, format, *rest):
        if format == "none":
            raise RuntimeError("no room")
        return go_on(model, format, *rest)

    monkeypatch.setattr(report, "right_answers", limited)
    monkeypatch.setattr(report, "_continue", stopped)
    saved = []
    found = measure(*tiny, ["int4"], SMALL, model_name="tiny", save=lambda record: saved.append(copy.deepcopy(record)))
    plain, four = found["rows"]
    assert plain["failures"] == ["needles at 320: no room", "questions: no room", "continuations: no room"]
    assert "failures" not in four
    assert [n["context"] for n in four["needles"]] == [160, 320]
    assert four["questions"]["asked"] == 60
    assert "continuations" not in four
    tasks = ["texts", "needles", "questions", "continuations"]
    assert [list(record["seconds"]) for record in saved] == [tasks[: i + 1] for i in range(4)]
    assert saved[-1] == found
    machine = {"cpu": "a processor", "cores": 2, "threads": 1, "gpus": [], "packages": {}}
    for record in saved:  # each can be drawn
        render({"command": "nibblekv report tiny", "machine": machine, **record}, tmp_path)
    text = (tmp_path / PAGE).read_text()
    assert "- `none` failed in continuations: no room" in text
    right = [n["right"] / n["asked"] for n in four["needles"]]
    assert re.search(rf"^\| `int4` \| {right[0]:.1%} \| {right[1]:.1%} \| [\d.]+% \| 3 \|$", text, re.MULTILINE)
    assert re.search(r"^\| `none` \| [\d.]+% \| - \| - \| 2 \|$", text, re.MULTILINE)


def test_quoted_figures_belong_to_a_model():
    assert {row["bits_per_value"] for row in report.QUOTED["smollm2"]} == {4.5, 5.0, 8.5}


def test_what_is_not_a_record_is_refused(record, tmp_path):
    with pytest.raises(
        ValueError,
        match="expected the JSON of `nibblekv report`, got one without model, dtype, texts, limit, sizes, seconds",
    ):
        render({"command": "", "machine": {}, "rows": []}, tmp_path)
    with pytest.raises(ValueError, match=r"expected figures of none and of a format, got \['none'\]"):
        render({**record, "rows": record["rows"][:1]}, tmp_path)


def test_the_command_measures_and_draws_the_same_page_again(folder, tmp_path):
    """Catches options that do not arrive, and a page that depends on more than its JSON."""
    sizes = (
        "--windows", "1", "--window", "64", "--copies", "1", "--contexts", "160", "--needles", "5", "--sheets", "1",
        "--question-orders", "1", "--prompts", "1", "--prompt", "16", "--new-tokens", "3",
    )  # fmt: skip
    out = tmp_path / "page"
    run("report", folder, "--formats", "int4", "--out", str(out), *sizes)
    found = json.loads((out / RECORD).read_text())
    assert found["sizes"] == {
        "windows": 1, "window": 64, "copies": 1, "contexts": [160], "needles": 5, "sheets": 1, "question_orders": 1,
        "prompts": 1, "prompt": 16, "new_tokens": 3,
    }  # fmt: skip
    assert found["texts"] == list(TEXTS)
    assert found["machine"]["packages"]["torch"] == torch.__version__
    assert [row["format"] for row in found["rows"]] == ["none", "int4"]
    again = tmp_path / "again"
    result = run("report", "--from", str(out / RECORD), "--out", str(again))
    assert str(again / PAGE) in result.output
    for path in again.iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name
    assert len(list(again.iterdir())) == 1 + len(PLOTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "report: expected a MODEL or --from FILE, and not both"),
        (("tiny", "--from", "x.json"), "report: expected a MODEL or --from FILE, and not both"),
        (("tiny", "--contexts", "long"), "contexts: expected numbers of tokens such as 1024,8192, got 'long'"),
        (("tiny", "--formats", "int5"), "format: expected one of int4"),
    ],
    ids=["nothing", "both", "contexts", "format"],
)
def test_errors_are_one_sentence(arguments, message):
    result = run("report", *arguments, code=1)
    assert message in result.output
    assert result.output.count("\n") == 1


def test_a_file_that_is_no_record_is_refused(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text("no JSON")
    assert "expected the JSON of `nibblekv report`, got" in run("report", "--from", str(path), code=1).output


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.mark.models
def test_smollm2_answers_questions_and_finds_needles():
    """Catches tasks that a small model cannot do at all, which would show no format's loss; chance is nearly 0 %."""
    model, tokenizer = load_model("smollm2", torch.float32)
    needles = right_answers(model, "none", needle_sheet(tokenizer, 1024, 24))
    questions = right_answers(model, "none", question_sheet(tokenizer))
    assert sum(needles) >= 0.5 * len(needles)
    assert sum(questions) >= 0.6 * len(questions)
