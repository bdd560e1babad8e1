"""The report's plots, as Plotly figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

COLOURS = {"bf16": "#8b93a7", "fp8": "#c58b2a", "fourfold": "#0b7a75"}
OTHER = ("#7a5ea8", "#b4536b", "#4d6fa8")
INK, GRID = "#1c2230", "#e6e8ee"


def colour(mode: str) -> str:
    """A mode's colour, the same in every plot."""
    return COLOURS.get(mode, OTHER[sum(map(ord, mode)) % len(OTHER)])


def _figure(x: str, y: str, height: int = 320) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 58, "r": 18, "t": 12, "b": 48},
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        hovermode="x unified",
        hoverlabel={"bgcolor": "white"},
    )
    axis = {
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "linecolor": "#b8bdca",
        "ticks": "outside",
        "tickcolor": "#b8bdca",
    }
    figure.update_xaxes(title=x, **axis)
    figure.update_yaxes(title=y, rangemode="tozero", **axis)
    return figure


def distribution(values: Mapping[str, Sequence[float]], unit: str, title: str) -> go.Figure:
    """Share of requests that were at most so slow: one step line a mode.  ``values`` by mode, in ``unit``."""
    figure = _figure(title, "share of requests")
    for mode, numbers in values.items():
        ordered = sorted(numbers)
        n = len(ordered)
        figure.add_scatter(
            x=[0.0, *ordered],
            y=[0.0, *((i + 1) / n for i in range(n))],
            name=mode,
            mode="lines",
            line={"color": colour(mode), "width": 3, "shape": "hv"},
            hovertemplate="%{y:.0%} of requests ≤ %{x:.2f} " + unit + "<extra>" + mode + "</extra>",
        )
    figure.update_layout(hovermode="closest")
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return figure


def timeline(
    series: Mapping[str, Mapping[str, Sequence[float]]], key: str, label: str, scale: float = 1.0
) -> go.Figure:
    """One of the /metrics readings over time, one line a mode."""
    figure = _figure("seconds since the first request", label)
    for mode, reading in series.items():
        figure.add_scatter(
            x=list(reading["t"]),
            y=[scale * value for value in reading[key]],
            name=mode,
            mode="lines",
            line={"color": colour(mode), "width": 2.5, "shape": "hv"},
            fill="tozeroy",
            opacity=0.95,
            fillcolor=_faint(colour(mode)),
        )
    return figure


def capacity(tokens: Mapping[str, int]) -> go.Figure:
    """Tokens that fit, one bar a mode."""
    figure = _figure("tokens in the KV cache", "", height=110 + 60 * len(tokens))
    modes = list(tokens)[::-1]
    figure.add_bar(
        x=[tokens[mode] for mode in modes],
        y=modes,
        orientation="h",
        marker={"color": [colour(mode) for mode in modes]},
        text=[f"<b>{tokens[mode]:,}</b>" for mode in modes],
        textposition="auto",
        insidetextfont={"color": "white", "size": 15},
        hovertemplate="%{y}: %{x:,} tokens<extra></extra>",
        width=0.62,
    )
    figure.update_xaxes(tickformat=",")
    figure.update_layout(hovermode="closest", margin={"l": 80, "r": 18, "t": 8, "b": 48})
    return figure


def html(figure: go.Figure) -> str:
    """A ``div`` that needs plotly.js on the page."""
    options: dict[str, Any] = {"displayModeBar": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=options))


def _faint(hexadecimal: str) -> str:
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.10)"
