"""A report as one page that needs nothing beside it: no script, no resource from anywhere. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from caraserve.bench.report.canvas import Picture, can_draw
from caraserve.bench.report.ratios import by_label
from caraserve.bench.report.summary import Summary
from caraserve.bench.report.table_text import DEFINITIONS, Sheet, beside_sheet, summary_sheets

_STYLE = """
:root { color-scheme: light dark; --line: #d0d4d9; --ink: #1f2328; --page: #ffffff; --quiet: #59636e; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3d444d; --ink: #e6edf3; --page: #0d1117; --quiet: #9198a1; --bad: #ff8a80; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 68rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.6rem 0 1.2rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0.3rem 0; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; }
th.word, td.word { text-align: left; }
figure { margin: 1.2rem 0; } figcaption, .quiet { color: var(--quiet); font-size: 0.9rem; }
svg { width: 100%; height: auto; color: var(--ink); }
.bad { color: var(--bad); font-weight: 600; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: color-mix(in srgb, var(--ink) 6%, transparent);
  padding: 0.8rem; border-radius: 0.4rem; }
"""


def page(told: Mapping[str, Any], summaries: Sequence[Summary], pictures: Sequence[Picture]) -> str:
    """The whole page; `told` is the report's JSON document."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>caraserve bench {escape(str(told['bench']))}</title>",
            f"<style>{_STYLE}</style></head><body>",
            *_body(told, summaries, pictures),
            "</body></html>\n",
        ]
    )


def _body(told: Mapping[str, Any], summaries: Sequence[Summary], pictures: Sequence[Picture]) -> Iterator[str]:
    computer = told["machine"]
    yield f"<h1>caraserve bench {escape(str(told['bench']))}</h1>"
    yield f"<p>{escape(str(computer['cpu']))}, {computer['cores']} cores, {escape(str(computer['system']))}</p>"
    for summary in summaries:
        if not summary.valid:
            reasons = escape(" ".join(summary.invalid_because))
            yield f'<p class="bad">{escape(summary.label)} is not valid. {reasons}</p>'
    if told["notes"]:
        yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in told["notes"]) + "</ul>"
    if len(by_label(summaries)) > 1:
        yield _table(beside_sheet(summaries))
    for picture in pictures:
        label = escape(picture.title, quote=True)
        drawn = picture.svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
        yield f"<figure>{drawn}<figcaption>{escape(picture.title)}</figcaption></figure>"
    if not can_draw():
        yield '<p class="quiet">There are no figures: matplotlib, of the package\'s <code>plot</code> extra, is not '
        yield "installed.</p>"
    for number, summary in enumerate(summaries, 1):
        yield f"<h2>Run {number}: {escape(summary.label)}</h2>"
        for sheet in summary_sheets(summary):
            yield _table(sheet)
    yield "<h2>What the words mean</h2>"
    yield "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in DEFINITIONS) + "</ul>"
    yield "<h2>To run it again</h2>"
    again = {name: told[name] for name in ("arguments", "seed", "machine", "versions")}
    yield f"<pre>{escape(json.dumps(again, indent=1))}</pre>"


def _table(sheet: Sheet) -> str:
    heads = "".join(f"<th{_kind(sheet, index)}>{escape(head)}</th>" for index, head in enumerate(sheet.heads))
    rows = "".join(
        "<tr>" + "".join(f"<td{_kind(sheet, index)}>{escape(cell)}</td>" for index, cell in enumerate(row)) + "</tr>"
        for row in sheet.rows
    )
    note = f'<p class="quiet">{escape(sheet.note)}</p>' if sheet.note else ""
    caption = f"<caption>{escape(sheet.title)}</caption>"
    return f'<div class="wide"><table>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{note}'


def _kind(sheet: Sheet, index: int) -> str:
    return ' class="word"' if index < sheet.left or len(sheet.heads) == 2 else ""
