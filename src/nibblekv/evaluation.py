"""Measure what a cache format costs a real model: perplexity, divergence from the unquantized cache, copying, greedy text.

Teacher-forced: one forward per window and format, in which every key and value that attention reads is the stored one
(`strict`), but for those that a format with a window and sinks reads unquantized (`int4+w32s4`). `+calib` at the end of a
format's name takes the calibration that was saved for the model, `+derived` the one that `attach` makes where none was. The
reference is the same model in the same dtype with an unquantized cache. Per scored position,
KL = sum_t p_ref(t) ln(p_ref(t) / p_format(t)) over the vocabulary, in nats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nibblekv.generation import generate_tokens
from nibblekv.peers import cache_argument, cache_maker, check_format, stored_bits_per_value

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["TEXTS", "beginning_tokens", "copy_windows", "evaluate", "load_text", "text_windows"]

# progress(stage, done, total), in forwards of the model.
Progress = Callable[[str, int, int], None]

# The built-in texts; `python` is the language reference that comes with the interpreter.
TEXTS = ("austen", "python", "bible")
_FILES = {"austen": "persuasion.txt", "bible": "king_james_bible.txt"}
# Predictions of a window's first quarter read little cache: they are context and not scored.
UNSCORED_FRACTION = 4
_ROWS = 128  # positions whose distributions are held at once
_PROBE_TOKENS = 16
_COMMON_WORDS = 600
_SEED = 1


def load_text(name: str) -> str:
    """Return a text by its name in `TEXTS`, or the contents of a file.

    Raises:
        FileNotFoundError: neither.
        ValueError: the file is not UTF-8 text.
    """
    if name in _FILES:
        return (resources.files("nibblekv") / "data" / _FILES[name]).read_text(encoding="utf-8")
    if name == "python":
        from pydoc_data.topics import topics

        return "\n".join(topics[key] for key in sorted(topics))
    path = Path(name).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"text: expected one of {', '.join(TEXTS)} or a file, got {name!r}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: expected UTF-8, got {name}: {error}") from error


def beginning_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer begins a text with (Gemma's <bos>)."""
    tokens = tokenizer("").input_ids
    return [t for t in tokens if t != tokenizer.eos_token_id or t == tokenizer.bos_token_id]


def text_windows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], num_windows: int, window: int = 1024
) -> torch.Tensor:
    """Cut windows from texts, spread evenly over each.

    Args:
        texts: contents; the windows are shared out in turn, the first texts getting one more where they do not divide.
        window: tokens of each, with the token that the tokenizer begins a text with, if any.

    Returns:
        [num_windows, window] int64.

    Raises:
        ValueError: too few windows or tokens.
    """
    if num_windows < 1:
        raise ValueError(f"windows: expected at least 1, got {num_windows}")
    if window < 16:
        raise ValueError(f"window: expected at least 16 tokens, got {window}")
    prefix = beginning_tokens(tokenizer)
    size = window - len(prefix)
    rows = []
    for i, text in enumerate(texts):
        count = len(range(i, num_windows, len(texts)))
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids if count else []
        if count * size > len(tokens):
            raise ValueError(f"text: expected at least {count * size} tokens for {count} windows, got {len(tokens)}")
        for w in range(count):
            begin = (len(tokens) - size) * w // max(count - 1, 1)
            rows.append(prefix + tokens[begin : begin + size])
    return torch.tensor(rows)


def copy_windows(tokenizer: PreTrainedTokenizerBase, num_windows: int, window: int = 1024) -> torch.Tensor:
    """Make windows of random common words, each sequence of words repeated once: a test of keys far back.

    Returns:
        [num_windows, window] int64 or one token less; the second half repeats the first, the beginning token left out.
    """
    counts = Counter(word for name in _FILES for word in re.findall(r"\b[a-z]{3,}\b", load_text(name)))
    words = [tokenizer(" " + word, add_special_tokens=False).input_ids for word, _ in counts.most_common(_COMMON_WORDS)]
    common = torch.tensor([t[0] for t in words if len(t) == 1 and t[0] != tokenizer.unk_token_id])
    prefix = torch.tensor(beginning_tokens(tokenizer), dtype=torch.long)
    half = (window - len(prefix)) // 2
    generator = torch.Generator().manual_seed(_SEED)
    rows = []
    for _ in range(num_windows):
        words_once = common[torch.randint(len(common), (half,), generator=generator)]
        rows.append(torch.cat((prefix, words_once, words_once)))
    return torch.stack(rows)


def evaluate(
    model: PreTrainedModel,
    formats: Sequence[str],
    windows: torch.Tensor,
    *,
    model_name: str,
    copy: torch.Tensor | None = None,
    new_tokens: int = 0,
    position_bins: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Compare formats with the unquantized cache on windows of tokens.

    Args:
        formats: names as `nibblekv.peers` lists them; repeated ones count once.
        windows: [N, window] int64; the last three quarters of their predictions are scored.
        copy: windows of `copy_windows`, of which the repetition is scored; None leaves the task out.
        new_tokens: tokens to generate greedily after the first half of each window; 0 leaves that out.
        position_bins: parts into which the scored positions are cut for `by_position`; 0 leaves that out.

    Returns:
        One row per format: model, format, bits_per_value, perplexity, kl_mean, kl_median, kl_p99, kl_p999, top1 (share of
        positions with the reference's most likely token), tokens (scored); with `copy` also copy_correct (share), copy_kl
        and copy_tokens; with `new_tokens` also greedy_agreement (share of generated tokens equal to the reference's at the
        same step), greedy_divergence (mean step of the first difference, new_tokens where there is none) and greedy_tokens;
        with `position_bins` also by_position, a list of {position (mean of the bin), kl_mean, top1}. A format that the model
        cannot use has a row with `note`, the reason, in place of figures.

    Raises:
        ValueError: an unknown format.
    """
    formats = list(dict.fromkeys(formats))
    for format in formats:
        check_format(format)
    refused: dict[str, str] = {}
    for format in formats:
        # Some reasons show only when a cache takes its first tokens: find them before the long work.
        try:
            with torch.inference_mode():
                _log_probs(model, format, windows[0, :_PROBE_TOKENS], 0)
        except (FileNotFoundError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            refused[format] = str(error).splitlines()[0]
    served = [format for format in formats if format not in refused]
    tasks = [("text", windows, windows.shape[1] // UNSCORED_FRACTION)]
    if copy is not None:
        tasks.append(("copy", copy, (copy.shape[1] + 1) // 2))
    total = sum(len(rows) for _, rows, _ in tasks) * (1 + len([f for f in served if f != "none"]))
    total += windows.shape[0] * (1 + len([f for f in served if f != "none"])) if new_tokens else 0
    done = 0

    def advance(stage: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(stage, done, total)

    bits: dict[str, float] = {}
    scores: dict[tuple[str, str], list[dict[str, torch.Tensor]]] = {}
    greedy: dict[str, list[torch.Tensor]] = {format: [] for format in served}
    with torch.inference_mode():
        for task, rows, first in tasks:
            for row in rows:
                reference, _ = _log_probs(model, "none", row, first)
                advance(f"{task}: none")
                for format in served:
                    found = reference
                    if format != "none":
                        found, bits[format] = _log_probs(model, format, row, first)
                        advance(f"{task}: {format}")
                    else:
                        bits[format] = 8.0 * model.dtype.itemsize
                    scores.setdefault((task, format), []).append(_score(reference, found, row[first + 1 :]))
        if new_tokens:
            for row in windows:
                prompt = row[None, : windows.shape[1] // 2]
                expected = _generate(model, "none", prompt, new_tokens)
                advance("greedy: none")
                for format in served:
                    found = expected
                    if format != "none":
                        found = _generate(model, format, prompt, new_tokens)
                        advance(f"greedy: {format}")
                    greedy[format].append(found == expected)
    table: list[dict[str, Any]] = []
    for format in formats:
        if format in refused:
            table.append({"model": model_name, "format": format, "note": refused[format]})
            continue
        table.append({"model": model_name, "format": format, "bits_per_value": bits[format]})
        table[-1] |= _text_columns(scores["text", format])
        if position_bins:
            table[-1]["by_position"] = _by_position(
                scores["text", format], windows.shape[1] // UNSCORED_FRACTION, position_bins
            )
        if copy is not None:
            table[-1] |= _copy_columns(scores["copy", format])
        if new_tokens:
            table[-1] |= _greedy_columns(greedy[format])
    return table


def _log_probs(model: PreTrainedModel, format: str, row: torch.Tensor, first: int) -> tuple[torch.Tensor, float]:
    """Return ln p of the predictions after positions first .. end - 1, [n, vocabulary] float32, and bits per value."""
    with cache_maker(model, format, strict=True) as make_cache:
        cache = make_cache()
        logits = model(row[None].to(model.device), **cache_argument(model, cache)).logits[0, first:-1]
        bits = stored_bits_per_value(model, format, cache)
    return logits.float().log_softmax(-1).cpu(), bits


def _score(reference: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return per position: kl, nll, agree (argmax as the reference's), correct (argmax is the target)."""
    kl = []
    for begin in range(0, len(targets), _ROWS):
        p, q = reference[begin : begin + _ROWS], found[begin : begin + _ROWS]
        kl.append((p.exp() * (p - q)).sum(-1))
    guess = found.argmax(-1)
    return {
        "kl": torch.cat(kl),
        "nll": -found.gather(1, targets[:, None].cpu())[:, 0],
        "agree": (guess == reference.argmax(-1)).float(),
        "correct": (guess == targets.cpu()).float(),
    }


def _generate(model: PreTrainedModel, format: str, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Return [new_tokens] int64, the greedy continuation of a prompt [1, length]."""
    with cache_maker(model, format, strict=True) as make_cache:
        out = generate_tokens(
            model, prompt.to(model.device), make_cache(), max_new_tokens=new_tokens, min_new_tokens=new_tokens
        )
    return out[0, prompt.shape[1] :].cpu()


def _gather(scores: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.cat([score[name] for score in scores]).double()


def _text_columns(scores: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    kl, nll = _gather(scores, "kl"), _gather(scores, "nll")
    return {
        "perplexity": float(nll.mean().exp()),
        "kl_mean": float(kl.mean()),
        "kl_median": float(kl.median()),
        "kl_p99": float(kl.quantile(0.99)),
        "kl_p999": float(kl.quantile(0.999)),
        "top1": float(_gather(scores, "agree").mean()),
        "tokens": len(kl),
    }


def _by_position(scores: list[dict[str, torch.Tensor]], first: int, bins: int) -> list[dict[str, float]]:
    """Return kl_mean and top1 of `bins` parts of the scored positions, which begin at `first` in every window."""
    kl, agree = (torch.stack([score[name] for score in scores]).double().mean(0) for name in ("kl", "agree"))
    parts = torch.arange(first, first + len(kl)).double().tensor_split(bins)
    return [
        {"position": float(part.mean()), "kl_mean": float(kl_part.mean()), "top1": float(agree_part.mean())}
        for part, kl_part, agree_part in zip(parts, kl.tensor_split(bins), agree.tensor_split(bins), strict=True)
    ]


def _copy_columns(scores: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    kl = _gather(scores, "kl")
    return {
        "copy_correct": float(_gather(scores, "correct").mean()),
        "copy_kl": float(kl.mean()),
        "copy_tokens": len(kl),
    }


def _greedy_columns(same: list[torch.Tensor]) -> dict[str, Any]:
    agreement = torch.stack(same)
    # Steps before the first difference.
    divergence = agreement.long().cumprod(-1).sum(-1)
    return {
        "greedy_agreement": float(agreement.double().mean()),
        "greedy_divergence": float(divergence.double().mean()),
        "greedy_tokens": agreement.numel(),
    }
