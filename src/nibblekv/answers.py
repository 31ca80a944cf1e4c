"""Ask a model many questions in one forward: needles in a long text, and a small question set.

A *sheet* is one sequence of tokens that holds questions with their right answers. The model reads it once; an answer counts
as right if each of its tokens is the most likely one after what stands before it: greedy decoding would write exactly this
answer, had the questions before been answered rightly. A hundred answers are then as cheap as one.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import torch

from nibblekv.evaluation import TEXTS, beginning_tokens, load_text
from nibblekv.peers import cache_argument, cache_maker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Sheet", "load_questions", "needle_sheet", "question_sheet", "right_answers"]

# The first questions show the model what kind of answer is asked for, and are not scored.
UNSCORED = 4
THINGS = (
    "anchor", "apple", "arrow", "basket", "bell", "blanket", "boat", "book", "bottle", "bridge", "brush", "bucket",
    "candle", "castle", "chair", "circle", "clock", "cloud", "coat", "coin", "crown", "desert", "door", "dragon",
    "drum", "eagle", "engine", "feather", "fence", "flag", "flower", "forest", "garden", "glass", "hammer", "harbor",
    "hat", "horse", "island", "jacket", "kettle", "key", "ladder", "lamp", "lion", "map", "mirror", "monkey",
    "mountain", "needle", "ocean", "orange", "palace", "pencil", "piano", "pillow", "rabbit", "ribbon", "river", "rocket",
    "shield", "spoon", "tower", "wagon",
)  # fmt: skip


@dataclass(frozen=True)
class Sheet:
    """Questions and their right answers in one sequence.

    Attributes:
        tokens: [length] int64.
        answers: (begin, end) of the tokens of each scored answer.
    """

    tokens: torch.Tensor
    answers: list[tuple[int, int]]


def load_questions() -> list[dict[str, str]]:
    """Return the question set: kind, question, answer."""
    text = (resources.files("nibblekv") / "data" / "questions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def question_sheet(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Sheet:
    """Write the question set down in an order of its own for every seed; the first `UNSCORED` are not scored."""
    questions = load_questions()
    random.Random(seed).shuffle(questions)
    parts = [(f"Q: {row['question']}\nA: ", row["answer"], "\n") for row in questions]
    return _sheet(tokenizer, "", parts, UNSCORED)


def needle_sheet(tokenizer: PreTrainedTokenizerBase, context: int, num_needles: int = 32, seed: int = 0) -> Sheet:
    """Hide notes such as "Note: lamp 4817." in a long text, evenly over its length, and ask for all numbers at its end.

    The number follows the very word that it is asked by. With words between them ("the number of the lamp is 4817"), small
    models find few, whatever their cache.

    Args:
        context: tokens of the sheet, questions included; it is shorter by less than a sentence of the text.
        num_needles: notes, at most as many as there are `THINGS`; all are asked for, in another order.

    Raises:
        ValueError: too many needles, or a context that is too short for them or longer than the texts.
    """
    if not UNSCORED < num_needles <= len(THINGS):
        raise ValueError(f"needles: expected {UNSCORED + 1} to {len(THINGS)}, got {num_needles}")
    rng = random.Random(seed)
    numbers = {thing: str(rng.randrange(1000, 10000)) for thing in rng.sample(THINGS, num_needles)}
    asked = rng.sample(list(numbers), num_needles)
    parts = [(f"Note: {thing} ", numbers[thing], ".\n") for thing in asked]
    needles = [f"Note: {thing} {number}." for thing, number in numbers.items()]
    sentences = _sentences()

    def write(count: int) -> Sheet:
        text = list(sentences[:count])
        for i in reversed(range(num_needles)):
            text.insert(count * (2 * i + 1) // (2 * num_needles), needles[i])
        return _sheet(tokenizer, " ".join(text) + "\n\n", parts, UNSCORED)

    shortest = len(write(0).tokens)
    if shortest > context:
        raise ValueError(f"context: expected at least {shortest} tokens for {num_needles} needles, got {context}")
    fits, too_long = 0, 1
    while too_long < len(sentences) and len(write(too_long).tokens) <= context:
        fits, too_long = too_long, min(2 * too_long, len(sentences))
    if len(write(too_long).tokens) <= context:
        raise ValueError(f"context: expected less than the {len(write(too_long).tokens)} tokens of the texts, got {context}")
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if len(write(middle).tokens) <= context else (fits, middle)
    return write(fits)


def right_answers(model: PreTrainedModel, format: str, sheet: Sheet) -> list[bool]:
    """Return which of a sheet's scored answers a model gives that reads every key and value as a format stores it.

    Args:
        format: a name as `nibblekv.peers` lists them.
    """
    positions = torch.tensor([i for begin, end in sheet.answers for i in range(begin, end)])
    tokens = sheet.tokens.to(model.device)
    with torch.inference_mode(), cache_maker(model, format, strict=True) as make_cache:
        out = model(tokens[None], logits_to_keep=(positions - 1).to(model.device), **cache_argument(model, make_cache()))
        same = out.logits[0].argmax(-1).cpu() == sheet.tokens[positions]
    lengths = [end - begin for begin, end in sheet.answers]
    return [bool(part.all()) for part in same.split(lengths)]


def _sheet(tokenizer: PreTrainedTokenizerBase, text: str, parts: list[tuple[str, str, str]], unscored: int) -> Sheet:
    """Tokenize a text that (cue, answer, rest) follow, and find the answers' tokens."""
    spans = []
    for cue, answer, rest in parts:
        spans.append((len(text) + len(cue), len(text) + len(cue) + len(answer)))
        text += cue + answer + rest
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    prefix = beginning_tokens(tokenizer)
    answers, token = [], 0
    for begin, end in spans:
        while encoded.offset_mapping[token][1] <= begin:
            token += 1
        first = token
        while token < len(encoded.offset_mapping) and encoded.offset_mapping[token][0] < end:
            token += 1
        answers.append((len(prefix) + first, len(prefix) + token))
    # Nothing after the last answer matters. An even length: HQQ's cache packs tokens of an odd number of heads in pairs.
    length = answers[-1][1] + answers[-1][1] % 2
    return Sheet(torch.tensor(prefix + encoded.input_ids)[:length], answers[unscored:])


@cache
def _sentences() -> tuple[str, ...]:
    text = " ".join(" ".join(load_text(name).split()) for name in TEXTS)
    return tuple(re.split(r"(?<=[.;!?]) ", text))
