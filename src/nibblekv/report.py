"""Measure how faithful cache formats are to a model: the figures of the report that `report_page.py` draws.

Five tasks, each for every format: next-token distributions on texts, copying, needles in long contexts, a question set, and
greedy continuations of text compared with the unquantized cache's, token by token.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from nibblekv.answers import Sheet, needle_sheet, question_sheet, right_answers
from nibblekv.evaluation import TEXTS, copy_windows, evaluate, load_text, text_windows
from nibblekv.generation import generate_tokens
from nibblekv.peers import PEERS, cache_maker, check_format
from nibblekv.plan import attention_layers, bits_per_value, raw_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DEFAULT_FORMATS", "Sizes", "measure"]

# progress(stage, done, total), in runs of the model.
Progress = Callable[[str, int, int], None]

DEFAULT_FORMATS = (
    "none", "int4", "int4+w32s4", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", *PEERS,
)  # fmt: skip
POSITION_BINS = 12
STEP_BINS = 16

# Figures that were measured with other programs, by model, and are shown beside ours.
QUOTED: dict[str, list[dict[str, Any]]] = {
    "smollm2": [
        {"format": "llama.cpp q4_0", "bits_per_value": 4.5, "kl_mean": 0.0491, "top1": 0.873},
        {"format": "llama.cpp q4_0, unrotated", "bits_per_value": 4.5, "kl_mean": 0.1418, "top1": 0.797},
        {"format": "llama.cpp q4_1", "bits_per_value": 5.0, "kl_mean": 0.0409, "top1": 0.885},
        {"format": "llama.cpp q8_0", "bits_per_value": 8.5, "kl_mean": 0.0039},
    ]
}
QUOTED_SOURCE = (
    "llama.cpp's own inference with `--cache-type-k` and `--cache-type-v`, on the same GGUF file and other windows of 1,024 "
    "tokens of the same three texts; mean KL and top-1 alone were kept"
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        windows, window: of text, and tokens of each.
        copies: windows of the copy task.
        contexts: tokens of the needle task's sheets, ascending; those beyond the model's limit are left out.
        needles: in one sheet.
        sheets: at most, of each context; long contexts have fewer, so that none costs more than the longest.
        question_orders: orders in which the question set is asked.
        prompts, prompt: texts to continue, and tokens of each.
        new_tokens: of each continuation.
    """

    windows: int = 9
    window: int = 1024
    copies: int = 3
    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192)
    needles: int = 32
    sheets: int = 2
    question_orders: int = 3
    prompts: int = 8
    prompt: int = 512
    new_tokens: int = 256

    def __post_init__(self) -> None:
        """Raise ValueError for a size below 1, before hours of measuring."""
        for name, size in asdict(self).items():
            if (min(size, default=0) if isinstance(size, tuple) else size) < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    formats: Sequence[str] = DEFAULT_FORMATS,
    sizes: Sizes | None = None,
    *,
    model_name: str,
    texts: Sequence[str] = TEXTS,
    progress: Progress | None = None,
    save: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Run every task with every format.

    In continuations each cache works as it does in `generate`, so a prompt may attend to its own raw keys; in all other
    tasks every key and value read is the stored one, but for a format's unquantized window and sinks.

    Args:
        formats: names as `nibblekv.peers` lists them; `none` is measured in any case.
        sizes: None for the default ones.
        texts: names in `evaluation.TEXTS` or files.
        save: called after every task with what is returned at the end, as far as it is measured: a run that is cut off
            keeps it.

    Returns:
        What JSON can hold: model, dtype, texts, sizes, seconds (by task), quoted (other programs' figures, with source), and
        rows, one per format: the columns of `evaluation.evaluate`; bits_held (bits per value at the longest context, the
        unquantized window and sinks included, 16 for `none`); needles, a list of {context, right, asked}; questions, {right,
        asked}; continuations, {divergence: steps before the first other token, one per prompt, new_tokens where there is
        none; agreement: share of equal tokens, by part of the continuation}. A refused format has `note` for all of these,
        one that fails in a task has a sentence in `failures` for its figures; where `none` cannot continue, no format is
        compared with it.

    Raises:
        ValueError: an unknown format, or sizes that the texts or the model cannot serve.
    """
    sizes = sizes or Sizes()
    names = ["none", *(format for format in dict.fromkeys(formats) if format != "none")]
    for name in names:
        check_format(name)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    contexts = [context for context in sizes.contexts if limit is None or context <= limit]
    if not contexts:
        raise ValueError(f"contexts: expected one of at most the model's {limit} positions, got {sizes.contexts}")
    contents = [load_text(name) for name in texts]
    windows = text_windows(tokenizer, contents, sizes.windows, sizes.window)
    copies = copy_windows(tokenizer, sizes.copies, sizes.window)
    prompts = text_windows(tokenizer, contents, sizes.prompts, sizes.prompt)
    needle_sheets = {
        context: [
            needle_sheet(tokenizer, context, sizes.needles, seed)
            for seed in range(max(1, min(sizes.sheets, contexts[-1] // context)))
        ]
        for context in contexts
    }
    questions = [question_sheet(tokenizer, seed) for seed in range(sizes.question_orders)]
    seconds: dict[str, float] = {}
    record: dict[str, Any] = {
        "model": model_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "texts": list(texts),
        "limit": limit,
        "sizes": {**asdict(sizes), "contexts": contexts},
        "seconds": seconds,
        "quoted": {"source": QUOTED_SOURCE, "rows": QUOTED[model_name]} if model_name in QUOTED else None,
    }
    begin = time.perf_counter()

    def lap(task: str) -> None:
        nonlocal begin
        seconds[task] = time.perf_counter() - begin
        save(record)
        begin = time.perf_counter()

    rows = record["rows"] = evaluate(
        model, names, windows, model_name=model_name, copy=copies, position_bins=POSITION_BINS, progress=progress
    )  # fmt: skip
    measured = {row["format"]: row for row in rows if "note" not in row}
    layers = attention_layers(model.config)
    values = sum(layer.values_per_token for layer in layers) * contexts[-1]
    for format, row in measured.items():
        # Nobody would serve a float32 cache: the unquantized one counts as 16 bits, whatever it was measured in.
        bits = bits_per_value(layers, "none") if format == "none" else row["bits_per_value"]
        raw = 0 if format in PEERS else raw_bytes(layers, format)
        row["bits_held"] = bits + 8 * raw / values
        row["needles"] = []
    lap("texts")
    for context, sheets in needle_sheets.items():
        for format, found in _score(model, measured, sheets, f"needles at {context:,}", progress).items():
            measured[format]["needles"].append({"context": context, **found})
    lap("needles")
    for format, found in _score(model, measured, questions, "questions", progress).items():
        measured[format]["questions"] = found
    lap("questions")
    expected: torch.Tensor | None = None
    for done, (format, row) in enumerate(measured.items()):
        if progress is not None:
            progress(f"continue: {format}", done, len(measured))
        with _failures_noted(row, "continuations"):
            tokens = _continue(model, format, prompts, sizes.new_tokens)
            expected = tokens if expected is None else expected
            row["continuations"] = _compare(tokens == expected)
        if expected is None:  # `none` is the first: without it there is nothing to compare with
            break
    lap("continuations")
    return record


@contextlib.contextmanager
def _failures_noted(row: dict[str, Any], task: str) -> Iterator[None]:
    """Note what stops a format in a task, so that one cache's limit does not cost the figures of all others."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        row.setdefault("failures", []).append(f"{task}: {str(error).splitlines()[0]}")


def _score(
    model: PreTrainedModel, rows: dict[str, dict[str, Any]], sheets: list[Sheet], stage: str, progress: Progress | None
) -> dict[str, dict[str, int]]:
    """Return {right, asked} over some sheets, of every format that can read them."""
    found: dict[str, dict[str, int]] = {}
    for i, (format, row) in enumerate(rows.items()):
        answers: list[bool] = []
        with _failures_noted(row, stage):
            for j, sheet in enumerate(sheets):
                if progress is not None:
                    progress(f"{stage}: {format}", i * len(sheets) + j, len(rows) * len(sheets))
                answers += right_answers(model, format, sheet)
            found[format] = {"right": sum(answers), "asked": len(answers)}
    return found


def _continue(model: PreTrainedModel, format: str, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Return [prompts, new_tokens] int64, the greedy continuations of prompts [prompts, length], all in one batch."""
    with cache_maker(model, format) as make_cache:
        out = generate_tokens(
            model, prompts.to(model.device), make_cache(), max_new_tokens=new_tokens, min_new_tokens=new_tokens
        )
    return out[:, prompts.shape[1] :].cpu()


def _compare(same: torch.Tensor) -> dict[str, Any]:
    """Sum up [prompts, new_tokens] bool, where a continuation has the unquantized one's token."""
    parts = same.double().mean(0).tensor_split(min(STEP_BINS, same.shape[1]))
    return {"divergence": same.long().cumprod(-1).sum(-1).tolist(), "agreement": [float(part.mean()) for part in parts]}
