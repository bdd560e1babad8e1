"""The demo's report: one HTML file that needs no network.

The first screen says what Fourfold gives and what it costs; plots and conditions follow.
"""

from __future__ import annotations

import html as escape_html
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fourfold.bench import figures

GOOD, COST, NEUTRAL = "good", "cost", "neutral"


@dataclass(frozen=True, slots=True)
class Card:
    """One headline: a large number, what it is, and the two numbers behind it."""

    value: str
    label: str
    detail: str
    tone: str


def _times(new: float, old: float, better_low: bool) -> tuple[str, str]:
    """``("4.2× lower", tone)`` for a pair of numbers; equal within 2% is neutral."""
    if not old or not new:
        return "–", NEUTRAL
    ratio = old / new if better_low else new / old
    if abs(ratio - 1) < 0.02:
        return "the same", NEUTRAL
    up, down = ("lower", "higher") if better_low else ("higher", "lower")
    shown = ratio if ratio > 1 else 1 / ratio
    return f"{shown:.1f}× {up if ratio > 1 else down}" if shown >= 1.3 else (
        f"{100 * (shown - 1):.0f}% {up if ratio > 1 else down}"
    ), (GOOD if ratio > 1 else COST)


def headlines(metrics: Mapping[str, Any]) -> list[Card]:
    """What a reader must see first: gains, then costs; a missing number leaves its card out."""
    base, ours = metrics["modes"]["bf16"], metrics["modes"]["fourfold"]
    cards: list[Card] = []

    def add(key: str, label: str, better_low: bool, unit: str, digits: int, factor: float = 1.0) -> None:
        old, new = base.get(key), ours.get(key)
        if old is None or new is None:
            return
        value, tone = _times(new, old, better_low)
        detail = f"{factor * new:,.{digits}f}{unit} instead of {factor * old:,.{digits}f}{unit}"
        cards.append(Card(value, label, detail, tone))

    old, new = base.get("capacity_tokens"), ours.get("capacity_tokens")
    if old and new:
        cards.append(Card(f"{new / old:.2f}×", "tokens in the same KV memory", f"{new:,} instead of {old:,}", GOOD))
    add("ttft_mean_s", "mean time to first token", True, " s", 2)
    add("ttft_p99_s", "p99 time to first token", True, " s", 2)
    add("tpot_mean_ms", "mean time per output token", True, " ms", 0)
    add("output_tokens_per_s", "output tokens per second", False, "", 0)
    if base.get("preemptions") is not None and ours.get("preemptions") is not None:
        fewer = base["preemptions"] - ours["preemptions"]
        detail = f"instead of {base['preemptions']:,}"
        cards.append(
            Card(
                f"{ours['preemptions']:,}", "preemptions", detail, GOOD if fewer > 0 else COST if fewer < 0 else NEUTRAL
            )
        )
    if base.get("perplexity") and ours.get("perplexity"):
        change = 100 * (ours["perplexity"] / base["perplexity"] - 1)
        detail = f"{ours['perplexity']:.2f} instead of {base['perplexity']:.2f}"
        cards.append(Card(f"{change:+.1f}%", "perplexity", detail, COST if change > 0.05 else NEUTRAL))
    if ours.get("kl") is not None:
        agreement = ours.get("top1_agreement")
        detail = (
            f"same first choice for {100 * agreement:.1f}% of tokens" if agreement is not None else "nats per token"
        )
        cards.append(Card(f"{ours['kl']:.4f}", "KL divergence from 16 bits", detail, COST))
    return cards


def verdict(metrics: Mapping[str, Any]) -> str:
    """One sentence for the top of the page, from the numbers."""
    base, ours = metrics["modes"]["bf16"], metrics["modes"]["fourfold"]
    text = f"The same vLLM, the same model, the same {ours['kv_bytes'] / 2**20:,.0f} MiB of KV memory and the same load"
    if base.get("capacity_tokens") and ours.get("capacity_tokens"):
        text += f": 4-bit pages hold {ours['capacity_tokens'] / base['capacity_tokens']:.2f} times the tokens"
    if base.get("ttft_mean_s") and ours.get("ttft_mean_s"):
        _, tone = _times(ours["ttft_mean_s"], base["ttft_mean_s"], True)
        joint = "and answers begin" if tone == GOOD else "but answers begin"
        text += f", {joint} after {ours['ttft_mean_s']:.2f} s instead of {base['ttft_mean_s']:.2f} s on average"
    return text + "."


ROWS = (
    ("capacity_tokens", "KV capacity, tokens", "{:,.0f}"),
    ("ttft_mean_s", "TTFT mean, s", "{:.3f}"),
    ("ttft_p99_s", "TTFT p99, s", "{:.3f}"),
    ("tpot_mean_ms", "TPOT mean, ms", "{:.1f}"),
    ("tpot_p99_ms", "TPOT p99, ms", "{:.1f}"),
    ("e2el_mean_s", "latency mean, s", "{:.2f}"),
    ("e2el_p99_s", "latency p99, s", "{:.2f}"),
    ("output_tokens_per_s", "output tokens/s", "{:.1f}"),
    ("preemptions", "preemptions", "{:,.0f}"),
    ("completed", "requests completed", "{:,.0f}"),
    ("failed", "requests failed", "{:,.0f}"),
    ("perplexity", "perplexity", "{:.3f}"),
    ("kl", "KL from 16 bits, nats", "{:.5f}"),
    ("top1_agreement", "same first choice", "{:.1%}"),
)
"""Key, name and format of every row of the table, here and in the terminal."""


def table_rows(metrics: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Rows of (name, one text a mode); a number that was not measured is a dash."""
    modes = list(metrics["modes"].values())
    rows = []
    for key, name, form in ROWS:
        values = [mode.get(key) for mode in modes]
        if any(value is not None for value in values):
            rows.append((name, [form.format(value) if value is not None else "–" for value in values]))
    return rows


def build(metrics: Mapping[str, Any], plotlyjs: str | None = None) -> str:
    """The page.

    Args:
        metrics: the demo's metrics.json, with ``detail`` (series and requests by mode).
        plotlyjs: the library's source; taken from the installed Plotly when not given.
    """
    if plotlyjs is None:
        from plotly.offline import get_plotlyjs

        plotlyjs = str(get_plotlyjs())
    detail = metrics["detail"]
    series = {mode: row["series"] for mode, row in detail.items()}
    tokens = {mode: row["capacity_tokens"] for mode, row in metrics["modes"].items() if row.get("capacity_tokens")}
    plots = (
        (
            "Time to first token",
            "Share of requests whose first token came within so many seconds. Further left is better.",
            figures.distribution(
                {mode: row["requests"]["ttft_s"] for mode, row in detail.items()}, "s", "TTFT, seconds"
            ),
        ),
        (
            "Time per output token",
            "Share of requests whose later tokens took at most so long each. Further left is better.",
            figures.distribution(
                {mode: row["requests"]["tpot_ms"] for mode, row in detail.items()}, "ms", "TPOT, milliseconds"
            ),
        ),
        (
            "Requests in the queue",
            "Waiting for room in the KV cache, read from the server's /metrics.",
            figures.timeline(series, "waiting", "requests waiting"),
        ),
        (
            "Preemptions",
            "Requests thrown out of a full cache, to be computed again. Cumulative.",
            figures.timeline(series, "preemptions", "preemptions"),
        ),
        (
            "KV cache in use",
            "Share of the blocks that hold tokens.",
            figures.timeline(series, "kv_usage", "% in use", 100.0),
        ),
        (
            "Requests running",
            "How many the engine decodes at once.",
            figures.timeline(series, "running", "requests running"),
        ),
    )
    template = resources.files("fourfold.bench").joinpath("report.html").read_text(encoding="utf-8")
    parts = {
        "PLOTLYJS": plotlyjs,
        "VERDICT": escape_html.escape(verdict(metrics)),
        "CARDS": "".join(_card(card) for card in headlines(metrics)),
        "CAPACITY": figures.html(figures.capacity(tokens)),
        "PLOTS": "".join(_plot(*plot) for plot in plots),
        "TABLE": _table(metrics),
        "CONDITIONS": _conditions(metrics),
        "NOTES": "".join(f"<p class='note'>{escape_html.escape(note)}</p>" for note in metrics.get("notes", [])),
    }
    for name, value in parts.items():
        template = template.replace(f"@@{name}@@", value)
    return template


def _card(card: Card) -> str:
    value, label, detail = (escape_html.escape(text) for text in (card.value, card.label, card.detail))
    return (
        f'<div class="card {card.tone}"><div class="value">{value}</div>'
        f'<div class="label">{label}</div><div class="detail">{detail}</div></div>'
    )


def _plot(title: str, text: str, figure: Any) -> str:
    return f"<section class='plot'><h3>{title}</h3><p>{text}</p>{figures.html(figure)}</section>"


def _table(metrics: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape_html.escape(mode)}</th>" for mode in metrics["modes"])
    body = "".join(
        f"<tr><td>{escape_html.escape(name)}</td>"
        + "".join(f"<td class='n'>{value}</td>" for value in values)
        + "</tr>"
        for name, values in table_rows(metrics)
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _conditions(metrics: Mapping[str, Any]) -> str:
    engine, environment = metrics["engine"], metrics["environment"]
    load = metrics.get("load", {})
    rows = {
        "model": engine.get("model"),
        "engine": f"vLLM {engine.get('version')}, {engine.get('dtype')}, blocks of {engine.get('block_size')} tokens",
        "processor": ", ".join(
            environment.get("gpus") or [f"{environment.get('cpu')}, {environment.get('cores')} cores"]
        ),
        "load": load.get("text"),
        "quality": metrics.get("quality", {}).get("text"),
        "commit": environment.get("commit"),
        "date": environment.get("date"),
    }
    return "".join(
        f"<dt>{escape_html.escape(name)}</dt><dd>{escape_html.escape(str(value))}</dd>"
        for name, value in rows.items()
        if value
    )
