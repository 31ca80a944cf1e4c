"""Draw the fidelity report: one Markdown page and its plots, from the JSON that `nibblekv report` keeps."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PAGE", "RECORD", "render", "require_matplotlib"]

Row = dict[str, Any]

PAGE, RECORD = "README.md", "report.json"
_OURS = ("#1f5fbf", "#00a0b0", "#7a3fb0", "#2e8b3d", "#c2407f", "#5b7bd5", "#55b89a", "#a58be0", "#8c564b", "#17425f")
_PEERS = ("#e07b00", "#c9302c", "#f0b000")
_QUOTED = ("#777777", "#aaaaaa", "#999999", "#555555")
_MARKERS = "osD^vP*X<>"
# A format that packs keys and values into at most so many bits is what the page's first picture is about.
_SMALL_BITS = 6.0
# Settings that make a file depend on the figures alone, and its letters on the reader's fonts.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nibblekv",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def require_matplotlib() -> None:
    """Raise ImportError, saying what to install, unless the plots can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError("the report's plots need matplotlib: pip install 'nibblekv[plots]'") from error


def render(record: dict[str, Any], folder: Path) -> list[Path]:
    """Write the page and its plots; the same record gives the same bytes.

    Args:
        record: what `report.measure` returns, with `command` and `machine`.
        folder: made if it does not exist; files of the same names are replaced.

    Returns:
        The files written, the page first.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: not such a record, or no format was measured.
    """
    require_matplotlib()
    import matplotlib

    keys = ("command", "machine", "model", "dtype", "texts", "limit", "sizes", "seconds", "rows")
    missing = [key for key in keys if key not in record]
    if missing:
        raise ValueError(f"record: expected the JSON of `nibblekv report`, got one without {', '.join(missing)}")
    rows = [row for row in record["rows"] if "note" not in row]
    rows.sort(key=lambda row: row["format"] != "none")
    if len(rows) < 2 or rows[0]["format"] != "none":
        raise ValueError(f"record: expected figures of none and of a format, got {[row['format'] for row in rows]}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / PAGE]
    plots: dict[str, Callable[[dict[str, Any], list[Row]], Figure]] = {
        "glance": _plot_glance,
        "divergence": _plot_kl,
        "position": _plot_position,
        "needles": _plot_needles,
        "continuations": _plot_continuations,
    }
    with matplotlib.rc_context(_STYLE):
        for name, plot in plots.items():
            paths.append(folder / f"{name}.svg")
            figure = plot(record, rows)
            figure.tight_layout()
            figure.savefig(paths[-1], bbox_inches="tight", facecolor="white", metadata={"Date": None})
    text = _page(record, rows)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{PAGE}-", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, paths[0])
    return paths


def _headline(rows: list[Row]) -> Row:
    """Return the small format that changes the fewest next tokens; the smallest one where all are large."""
    ours = [row for row in rows if not row["format"].startswith("hf-") and row["format"] != "none"] or rows
    small = [row for row in ours if row["bits_held"] <= _SMALL_BITS]
    return max(small, key=lambda row: row["top1"]) if small else min(ours, key=lambda row: row["bits_held"])


def _looks(rows: list[Row], quoted: Sequence[Row] = ()) -> dict[str, dict[str, Any]]:
    """Return the colour and marker of every format: black for none, cool colours for ours, warm and grey for others."""
    looks: dict[str, dict[str, Any]] = {}
    counts = {"ours": 0, "peers": 0, "quoted": 0}
    palettes = {"ours": _OURS, "peers": _PEERS, "quoted": _QUOTED}
    for row in [*rows, *quoted]:
        format = row["format"]
        if format == "none":
            looks[format] = {"color": "black", "marker": "o"}
            continue
        kind = "quoted" if row in quoted else "peers" if format.startswith("hf-") else "ours"
        palette, i = palettes[kind], counts[kind]
        looks[format] = {"color": palette[i % len(palette)], "marker": _MARKERS[i % len(_MARKERS)]}
        counts[kind] += 1
    return looks


def _plot_glance(record: dict[str, Any], rows: list[Row]) -> Figure:
    best = _headline(rows)
    plain = next(row for row in rows if row["format"] == "none")
    ordered = sorted(rows, key=lambda row: (row["format"] != "none", 1 - row["top1"]))
    figure = _figure(0.38 * len(rows) + 1.5)
    memory, changed = figure.subplots(1, 2, sharey=True)
    names = ["not quantized (16 bit)" if row["format"] == "none" else row["format"] for row in ordered]
    colors = [
        "#1f5fbf"
        if row is best
        else "#444444"
        if row is plain
        else "#e2a15c"
        if row["format"].startswith("hf-")
        else "#9db8d9"
        for row in ordered
    ]
    figures = [
        (memory, "memory of the cache", [row["bits_held"] / plain["bits_held"] for row in ordered], 0),
        (changed, "next words that change", [1 - row["top1"] for row in ordered], 1),
    ]
    for axes, title, shares, digits in figures:
        axes.barh(names, shares, color=colors, height=0.72)
        top = max(shares)
        for i, share in enumerate(shares):
            bold = "bold" if ordered[i] is best else "normal"
            axes.text(share + 0.015 * top, i, f"{share:.{digits}%}", va="center", fontweight=bold)
        axes.set_title(title)
        axes.set_xlim(0, 1.18 * top)
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.spines[["bottom"]].set_visible(False)
        axes.grid(False)
    memory.invert_yaxis()
    for label, row in zip(memory.get_yticklabels(), ordered, strict=True):
        label.set_fontweight("bold" if row is best else "normal")
    figure.suptitle(_glance_sentence(record, rows), fontweight="bold", fontsize=12)
    legend = "shorter is better on both sides; blue: nibblekv"
    if any(row["format"].startswith("hf-") for row in rows):
        legend += ", orange: the quantized caches of transformers"
    figure.text(0.5, 0.0, legend, ha="center", va="top", color="#555555")
    return figure


def _glance_sentence(record: dict[str, Any], rows: list[Row]) -> str:
    best, plain = _headline(rows), next(row for row in rows if row["format"] == "none")
    share = best["bits_held"] / plain["bits_held"]
    kept = 100 * best["top1"]
    return f"{record['model']} with {best['format']}: {share:.0%} of the memory, {kept:.0f} of 100 next words the same"


def _plot_kl(record: dict[str, Any], rows: list[Row]) -> Figure:
    quoted = record["quoted"]["rows"] if record.get("quoted") else []
    looks = _looks(rows, quoted)
    figure = _figure(4.2)
    panels = figure.subplots(1, 3)
    for axes, key, title in zip(panels, ("kl_mean", "kl_p99", "kl_p999"), ("mean", "99 %", "99.9 %"), strict=True):
        for row in [*rows, *quoted]:
            if row.get(key):
                bits = row.get("bits_held", row["bits_per_value"])
                hollow = {"markerfacecolor": "white"} if row in quoted else {}
                axes.plot(bits, row[key], linestyle="", markersize=8, label=row["format"], **looks[row["format"]], **hollow)
        axes.set_yscale("log")
        axes.set_xlabel("bits per value held")
        axes.set_title(title)
    panels[0].set_ylabel("KL to the unquantized cache, nats")
    _legend_below(figure, panels[0])
    return figure


def _plot_position(record: dict[str, Any], rows: list[Row]) -> Figure:
    figure = _figure(3.4)
    axes = figure.subplots()
    for format, look in _looks(rows).items():
        bins = next(row["by_position"] for row in rows if row["format"] == format)
        if format != "none":
            axes.plot([b["position"] for b in bins], [100 * b["top1"] for b in bins], label=format, markersize=4, **look)
    axes.set_xlabel("position in the text, tokens")
    axes.set_ylabel("next token the same, %")
    _legend_beside(axes)
    return figure


def _plot_needles(record: dict[str, Any], rows: list[Row]) -> Figure:
    figure = _figure(3.4)
    axes = figure.subplots()
    looks = _looks(rows)
    for row in rows:
        contexts = [n["context"] for n in row["needles"]]
        if not row["needles"]:
            continue
        wide: Row = {"linewidth": 2.5, "linestyle": "--", "zorder": 9} if row["format"] == "none" else {}
        shares = [100 * n["right"] / n["asked"] for n in row["needles"]]
        axes.plot(contexts, shares, label=row["format"], markersize=5, **looks[row["format"]], **wide)
    axes.set_xscale("log", base=2)
    contexts = record["sizes"]["contexts"]
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("needles found, %")
    _legend_beside(axes)
    return figure


def _plot_continuations(record: dict[str, Any], rows: list[Row]) -> Figure:
    figure = _figure(3.6)
    intact, same = figure.subplots(1, 2)
    steps = record["sizes"]["new_tokens"]
    looks = _looks(rows)
    for row in rows:
        if row["format"] == "none" or "continuations" not in row:
            continue
        found, look = row["continuations"], looks[row["format"]]
        firsts = found["divergence"]
        left = [100 * sum(first >= step for first in firsts) / len(firsts) for step in range(steps + 1)]
        intact.plot(range(steps + 1), left, label=row["format"], color=look["color"], drawstyle="steps-post")
        width = steps / len(found["agreement"])
        middles = [(i + 0.5) * width for i in range(len(found["agreement"]))]
        same.plot(middles, [100 * share for share in found["agreement"]], markersize=4, **look)
    intact.set_ylabel("continuations still identical, %")
    same.set_ylabel("tokens the same at this step, %")
    for axes in (intact, same):
        axes.set_xlabel("generated tokens")
        axes.set_ylim(0, 103)
    _legend_below(figure, intact)
    return figure


def _figure(height: float) -> Figure:
    """Return an empty figure of the page's width."""
    from matplotlib.figure import Figure

    return Figure(figsize=(9, height))


def _legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4)


def _legend_beside(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _page(record: dict[str, Any], rows: list[Row]) -> str:
    sizes = record["sizes"]
    parts = [
        f"# {record['model']}: what a quantized KV cache changes",
        f"![{_glance_sentence(record, rows)}](glance.svg)",
        "*Memory* is that of the cache, scale words and unquantized tokens included, against 16 bits per value at "
        f"{sizes['contexts'][-1]:,} tokens. *Next words that change* are the positions of a text at which another token "
        "became the most likely one. Names with `+w32s4` keep the last 32 and the first 4 tokens of a sequence unquantized; "
        "`hf-` are the quantized caches of transformers.",
        "## In numbers",
        _numbers(rows, len(sizes["contexts"])),
        "KL is that of the next-token distribution to the unquantized cache's, in nats, per position. *Copied*: words of a "
        f"random list repeated from about {sizes['window'] // 2} tokens back. *Needles* and *questions*: answers that are "
        "right. *First differs*: the median step at which a greedy continuation leaves the unquantized one.",
        *(f"- `{row['format']}` was not measured: {row['note']}" for row in record["rows"] if "note" in row),
        *(f"- `{row['format']}` failed in {failure}" for row in rows for failure in row.get("failures", [])),
        "## How far the predictions move",
        "![KL divergence against bits per value](divergence.svg)",
        "Lower is better, and further left is smaller. The rare large errors on the right are what a reader notices.",
        *([f"Hollow markers are quoted, not measured here: {record['quoted']['source']}."] if record.get("quoted") else []),
        "## Does it grow with the position?",
        "![Agreement of the next token against the position](position.svg)",
        f"The share of positions with the same most likely token, over {sizes['windows']} windows of {sizes['window']:,} "
        "tokens. A line that falls to the right would mean that errors add up as the cache fills.",
        "## Needles in long contexts",
        "![Needles found against the context](needles.svg)",
        _needles(rows, sizes["contexts"]),
        f'{sizes["needles"]} notes such as "Note: lamp 4817." are spread over a book; all numbers '
        "are asked for at its end. A share p of n answers is known to about sqrt(p (1 - p) / n), and the same notes are "
        f"asked of every format. The model's limit is {_count(record['limit'])} positions.",
        "## Free continuations",
        "![Continuations that are still identical, and tokens that agree, against the step](continuations.svg)",
        f"{sizes['prompts']} texts of {sizes['prompt']} tokens, continued greedily by {sizes['new_tokens']} tokens. One "
        "other token is enough for another text, so this shows the smallest differences: that a text is another one, not "
        "that it is worse.",
        "## How it was measured",
        f"`{record['command']}`",
        f"{_machine(record['machine'])}; model in {record['dtype']}; texts: {', '.join(record['texts'])}. In minutes: "
        + ", ".join(f"{task} {seconds / 60:.1f}" for task, seconds in record["seconds"].items())
        + ".",
        "Every key and value that attention reads is the stored one, the prompt's own included, but for a format's "
        "unquantized window and sinks; continuations use the caches as `generate` does.",
        f"All figures are in [{RECORD}]({RECORD}); `nibblekv report --from {RECORD}` draws this page again.",
    ]
    return "\n\n".join(parts) + "\n"


def _numbers(rows: list[Row], num_contexts: int) -> str:
    head = [
        "format", "bits per value", "KL, mean", "median", "99 %", "99.9 %", "same next token", "copied", "needles",
        "questions", "same tokens when continuing", "first differs at",
    ]  # fmt: skip
    body = []
    for row in rows:
        complete = len(row["needles"]) == num_contexts
        found = row.get("continuations")
        body.append(
            [
                f"`{row['format']}`",
                f"{row['bits_held']:.2f}",
                *(f"{row[key]:.4f}" for key in ("kl_mean", "kl_median")),
                *(f"{row[key]:.3f}" for key in ("kl_p99", "kl_p999")),
                *(f"{row[key]:.1%}" for key in ("top1", "copy_correct")),
                _share(row["needles"] if complete else []),
                _share([row["questions"]] if "questions" in row else []),
                f"{statistics.mean(found['agreement']):.1%}" if found else "-",
                _first_difference(found["divergence"], rows[0]["continuations"]["divergence"][0]) if found else "-",
            ]
        )
    return _table(head, body)


def _needles(rows: list[Row], contexts: list[int]) -> str:
    body = []
    for row in rows:
        shares = [_share([n for n in row["needles"] if n["context"] == context]) for context in contexts]
        whole = _share(row["needles"]) if "-" not in shares else "-"
        body.append([f"`{row['format']}`", *shares, whole, str(sum(n["asked"] for n in row["needles"]))])
    return _table(["format", *(f"{context:,}" for context in contexts), "all", "answers"], body)


def _table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _share(counts: list[dict[str, int]]) -> str:
    if not counts:
        return "-"
    return f"{sum(count['right'] for count in counts) / sum(count['asked'] for count in counts):.1%}"


def _first_difference(firsts: list[int], longest: int) -> str:
    middle = statistics.median(firsts)
    return "never" if min(firsts) == longest else f"{middle:.0f}" if middle < longest else f"over {longest}"


def _machine(machine: dict[str, Any]) -> str:
    packages = machine["packages"]
    found = [f"{name} {packages[name]}" for name in ("torch", "transformers", "optimum-quanto", "hqq") if name in packages]
    devices = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['threads']} threads of {machine['cores']} cores"
    return f"{devices}; {', '.join(found)}"


def _count(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number:,}"
