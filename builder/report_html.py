"""report.html: the build report as one page without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --bar: #3b76c4; --soft: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .15rem .6rem .15rem 0; border-bottom: 1px solid var(--soft); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1.2rem; } dt { opacity: .7; } dd {
margin: 0; } svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill:
currentColor; } svg rect, svg circle { fill: var(--bar); } svg path { fill: none; stroke: var(--bar);
stroke-width: 1.5; } svg line { stroke: var(--soft); }
"""

_WIDTH, _LABEL, _ROW = 900, 210, 16


def page(report: Mapping[str, Any]) -> str:
    """The HTML of a report as `BuildReport.to_dict` gives it."""
    title = f"{report['source']}: {report['recipe']} for {report['target']}"
    layers = report["layers"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        _facts(report),
        "<h2>What changed the weights most</h2>",
        _dominant(report["dominant"]),
        "<h2>Relative error of each layer's weights</h2>",
        _curve([(layer["layer"], layer["relative_error"]) for layer in layers], "relative error"),
        "<h2>Size of each layer</h2>",
        _bars(
            [(layer["layer"], layer["packed_bytes"]) for layer in layers],
            lambda value: f"{value / 1e6:.2f} MB",
        ),
    ]
    if report["search"] is not None:
        parts += ["<h2>Sensitivity</h2>", _sensitivity(report["search"])]
    parts += ["<h2>Layers</h2>", _layers(layers), "<h2>Rewrites</h2>", _rewrites(report["rewrites"])]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _facts(report: Mapping[str, Any]) -> str:
    rows = [
        ("weights", f"{report['weight_bytes'] / 1e6:.1f} MB, from {report['source_bytes'] / 1e6:.1f} MB"),
        ("bits a weight", f"{report['bits_per_weight']:.3f}"),
        ("nodes", str(report["nodes"])),
        *(
            ("cache", f"{group['dtype']}, {group['bytes_per_token']:,.0f} bytes a token")
            for group in report["cache"]["groups"]
        ),
        ("build", f"{report['seconds']:.1f} s"),
    ]
    if error := report["error"]:
        ratio = error["perplexity"] / error["reference_perplexity"]
        rows += [
            ("perplexity before", f"{error['reference_perplexity']:.4f} over {error['tokens']} tokens"),
            ("perplexity after", f"{error['perplexity']:.4f}, {ratio:.4f} times"),
            ("mean KL", f"{error['mean_kl']:.3g} nats"),
            ("same greedy choice", f"{error['greedy_match']:.2%}"),
        ]
    if engine := report["engine_error"]:
        against = "of the engine against its own weights in float32"
        rows += [
            (f"mean KL {against}", f"{engine['mean_kl']:.3g} nats over {engine['tokens']} tokens"),
            (f"greedy agreement {against}", f"{engine['greedy_agreement']:.2%}"),
        ]
    if search := report["search"]:
        rows.append(
            ("searched mix", f"{search['bits']:.3f} bits, KL {search['expected_kl']:.3g} nats expected")
        )
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows) + "</dl>"


def _dominant(dominant: Sequence[Mapping[str, Any]]) -> str:
    if not dominant:
        return "<p>Nothing: every weight is as it was.</p>"
    return _bars([(d["layer"], d["share"]) for d in dominant], lambda value: f"{value:.1%}")


def _bars(values: Sequence[tuple[str, float]], words: Callable[[float], str]) -> str:
    top = max((value for _, value in values), default=0) or 1
    room = _WIDTH - _LABEL - 80
    rows = []
    for index, (name, value) in enumerate(values):
        y = index * _ROW
        width = room * value / top
        rows.append(
            f'<text x="{_LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{_LABEL}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 5}"/>'
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 12}">{escape(words(value))}</text>'
        )
    height = max(1, len(values)) * _ROW
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(rows)}</svg>'


def _curve(values: Sequence[tuple[str, float]], axis: str) -> str:
    """Points in the order of the model, each with its layer's name on hover."""
    height, left, bottom = 220, 60, 24
    top = max((value for _, value in values), default=0) or 1
    step = (_WIDTH - left - 10) / max(1, len(values) - 1)
    places = [
        (left + index * step, (height - bottom) - (height - bottom - 10) * value / top)
        for index, (_, value) in enumerate(values)
    ]
    points = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(name)}: {value:.3g}</title></circle>'
        for (x, y), (name, value) in zip(places, values, strict=True)
    )
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) if places else ""
    grid = "".join(
        f'<line x1="{left}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{top * share:.3g}</text>'
        for share in (0, 0.5, 1)
        for y in [(height - bottom) - (height - bottom - 10) * share]
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{grid}<path d="{line}"/>{points}'
        f'<text x="{_WIDTH / 2}" y="{height - 4}" text-anchor="middle">layers in order; {escape(axis)}</text>'
        "</svg>"
    )


def _sensitivity(search: Mapping[str, Any]) -> str:
    values = [(s["layer"], s["options"][0]["kl"]) for s in search["sensitivities"]]
    formats = sorted({s["options"][0]["format"] for s in search["sensitivities"]})
    words = f"KL of the next token, in nats, with one layer alone in {' or '.join(formats)}."
    return f"<p>{escape(words)}</p>" + _bars(values, lambda value: f"{value:.2e}")


def _layers(layers: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            [layer["layer"], layer["format"], layer["method"], "x".join(map(str, layer["shape"]))],
            [
                f"{layer['packed_bytes'] / 1e6:.3f}",
                f"{layer['relative_error']:.2e}",
                f"{layer['max_error']:.2e}",
            ],
        )
        for layer in layers
    ]
    return _table(["layer", "format", "method", "shape"], ["MB", "relative error", "largest error"], rows)


def _rewrites(rewrites: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            [r["rewrite"], "; ".join(f"{left['node']}: {left['reason']}" for left in r["left"])],
            [str(r["matched"])],
        )
        for r in rewrites
    ]
    return _table(["rewrite", "left, and why"], ["matched"], rows)


def _table(
    words: Sequence[str], numbers: Sequence[str], rows: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> str:
    head = "".join(f"<th>{escape(w)}</th>" for w in words) + "".join(
        f'<th class="n">{escape(n)}</th>' for n in numbers
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in text)
        + "".join(f'<td class="n">{escape(cell)}</td>' for cell in figures)
        + "</tr>"
        for text, figures in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
