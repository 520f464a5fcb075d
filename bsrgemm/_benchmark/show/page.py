"""One page of HTML from a file of results: tables, pictures, the machine, and how to measure it again.

The page needs no other file: styles and pictures are inside, and there is no script.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

from .cells import TITLES, Row, cells, columns, flops_text, noise, remarks, status

_STYLE = """
:root { color-scheme: light dark; --line: #ccc; --dim: #666; --good: #00684a; --bad: #a33b00; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --dim: #aaa; --good: #4fd0a5; --bad: #ff9a5c; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p.warning { color: var(--bad); font-weight: 600; }
p.about, figcaption, footer { color: var(--dim); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.good { color: var(--good); } td.bad { color: var(--bad); font-weight: 600; text-align: left; white-space: normal; }
td.behind { color: var(--bad); }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figure img { width: 100%; background: white; border: 1px solid var(--line); }
pre { padding: 0.7rem; border: 1px solid var(--line); overflow-x: auto; }
"""

_WHOLE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_CAPTIONS = {
    "roofline": "Flops a byte against flops a second; the lines are a copy and dense BLAS, measured in the same run.",
    "density": "How long a sparse product takes beside a dense one, by the share of blocks that are there.",
    "block": "Rate of the stored blocks by their size.",
    "columns": "Rate by the number of columns of B.",
    "length": "Time of attention by length, for each mask.",
    "spmv": "Bytes of A, x and y over time, beside a copy.",
}


def page(found: dict[str, Any], command: str, pictures: dict[str, bytes]) -> str:
    """The page for what `results.read` gives; `pictures` are SVG by name."""
    about, rows = found["machine"], found["rows"]
    machine = (
        about.get("card", about["cpu"]) if found["device"] == "cuda" else f"{about['cpu']}, {about['cores']} cores"
    )
    parts = [
        f"<h1>bsrgemm {_text(about['bsrgemm'])} on {_text(machine)}</h1>",
        f'<p class="about">{_text(about["date"])}, {len(rows)} problems, {found["duration"]:.0f} s'
        f"{', quick' if found['quick'] else ''}{'; cut short: ' + _text(found['cut']) if 'cut' in found else ''}. "
        "Each result was checked against float64 before it was timed. A ratio is a peer's time over ours; the roof is "
        "the larger of flops over the rate of dense BLAS and bytes over the bandwidth of a copy.</p>",
        _roofs(found.get("ceilings", {})),
    ]
    warning = noise(rows)
    if warning is not None:
        parts.append(f'<p class="warning">{_text(warning)}</p>')
    if pictures:
        parts.append(
            f'<section class="pictures">{"".join(_picture(name, svg) for name, svg in pictures.items())}</section>'
        )
    for group in dict.fromkeys(row["group"] for row in rows):
        parts.append(f"<h2>{_text(TITLES[group])}</h2>{_table([row for row in rows if row['group'] == group])}")
    said = remarks(rows)
    if said:
        parts.append(f"<h2>Peers that could not be timed</h2><ul>{''.join(f'<li>{_text(x)}</li>' for x in said)}</ul>")
    parts.append(f"<h2>Measure it again</h2><pre>{_text(command)}</pre>")
    parts.append(f"<h2>Environment</h2>{_environment(about)}")
    return _WHOLE.format(title=_text(f"bsrgemm on {machine}"), style=_STYLE, body="\n".join(parts))


def drawn(found: dict[str, Any]) -> dict[str, bytes]:
    """The pictures of these results as SVG; none without matplotlib."""
    try:
        from .figures import figures

        made = figures(found)
    except ImportError:
        return {}
    pictures = {}
    for name, figure in made.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        pictures[name] = buffer.getvalue()
    return pictures


def _text(value: object) -> str:
    return html.escape(str(value))


def _roofs(ceilings: dict[str, Any]) -> str:
    copied = ceilings.get("bytes_per_second")
    parts = [f"copy {copied / 1e9:,.0f} GB/s"] if copied else []
    parts += [f"dense {kind} {flops_text(rate)}" for kind, rate in ceilings.get("flops_per_second", {}).items()]
    return f"<p>Roofs of this run: {_text(', '.join(parts))}.</p>" if parts else ""


def _picture(name: str, svg: bytes) -> str:
    caption = _CAPTIONS.get(name, name)
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return f'<figure><img src="{source}" alt="{_text(caption)}"><figcaption>{_text(caption)}</figcaption></figure>'


def _table(rows: Sequence[Row]) -> str:
    heads = columns(rows)
    lines = [_line("th", ((head, "") for head in heads))]
    for row in rows:
        texts = cells(row, heads)
        if status(row) is not None:
            lines.append(
                f'<tr><td>{_text(texts[0])}</td><td class="bad" colspan="{len(heads) - 1}">{_text(texts[1])}</td></tr>'
            )
            continue
        ratios = (row["peers"].get(head, {}).get("ratio") for head in heads)
        kinds = ("" if ratio is None else "good" if ratio >= 1 else "behind" for ratio in ratios)
        lines.append(_line("td", zip(texts, kinds, strict=True)))
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _line(tag: str, found: Iterable[tuple[str, str]]) -> str:
    opened = ((f'<{tag} class="{kind}">' if kind else f"<{tag}>", text) for text, kind in found)
    return f"<tr>{''.join(f'{start}{_text(text)}</{tag}>' for start, text in opened)}</tr>"


def _environment(about: dict[str, Any]) -> str:
    flat = {**{k: v for k, v in about.items() if k != "peers"}, **about.get("peers", {})}
    rows = "".join(_line("td", ((str(name), ""), (str(value), ""))) for name, value in flat.items())
    return f'<div class="wide"><table>{rows}</table></div>'
