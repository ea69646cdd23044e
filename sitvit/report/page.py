"""What every report page is made of: one self-contained HTML file for a desk, a phone and paper.

Pictures lie inside as data, wide tables scroll in their own box, and nothing is fetched from anywhere.
"""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from .. import runtime

STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 64rem;
  margin: 1.5rem auto 4rem; padding: 0 1rem; overflow-wrap: break-word }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem } h3 { font-size: 1rem; margin: 1.4rem 0 .3rem }
nav { font-size: .9rem; margin: .8rem 0 } nav a { margin-right: 1rem; white-space: nowrap }
a { color: #0b57a4 }
.wide { overflow-x: auto; margin: .8rem 0 } .wide:focus-visible { outline: 2px solid #0b57a4 }
table { border-collapse: collapse; font-size: .875rem }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .7rem; text-align: left; vertical-align: top }
th { border-bottom: 2px solid #666; vertical-align: bottom } tbody tr:hover { background: #f4f6f8 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
td.number { white-space: nowrap }
.facts table { table-layout: fixed; width: 100% } .facts td { overflow-wrap: anywhere }
figure { margin: 1rem 0 } figure img { display: block; max-width: 100%; height: auto }
figcaption, .note { color: #555; font-size: .9rem } .note { margin: .4rem 0 }
code { font-size: .8rem; overflow-wrap: anywhere } li { margin: .2rem 0 }
@media print { body { font-size: 10pt; max-width: none; margin: 0 } nav { display: none }
  figure, tr { break-inside: avoid } h2 { break-after: avoid } .wide { overflow: visible }
  table { font-size: 7.5pt } th, td { padding: .15rem .3rem } }
"""

Section = tuple[str, list[str]]
"""A heading and the HTML below it."""


def page(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole file; sections without content are left out, and the others linked at the top."""
    shown = [(f"part-{number}", *section) for number, section in enumerate(sections, 1) if any(section[1])]
    links = "".join(f"<a href='#{name}'>{text(heading)}</a> " for name, heading, _ in shown)
    body = [f"<h1>{text(title)}</h1>", *lead, f"<nav aria-label='Sections'>{links}</nav>"]
    for name, heading, parts in shown:
        body += [f"<section id='{name}'><h2>{text(heading)}</h2>", *parts, "</section>"]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{text(title)}</title><link rel='icon' href='data:,'><style>{STYLE}</style></head>\n"
        "<body>" + "\n".join(body) + "</body></html>\n"
    )


def table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int) -> str:
    """A table in a box that scrolls; the first `num_text_columns` are text, the others numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ["" if i < num_text_columns else " class='number'" for i in range(len(cells))]
        pairs = zip(kinds, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{text(cell)}</{tag}>' for kind, cell in pairs)}</tr>"

    return (
        f"<div class='wide' role='region' tabindex='0' aria-label='{text(name)}'><table><thead>"
        f"{line('th', head)}</thead><tbody>{''.join(line('td', row) for row in rows)}</tbody></table></div>"
    )


def facts(name: str, rows: Sequence[Sequence[str]]) -> str:
    """A table of settings and their values, which breaks lines rather than scroll."""
    return f"<div class='facts'>{table(name, ['setting', 'value'], rows, 2)}</div>"


def image(path: Path, alt: str, caption: str = "") -> str:
    """The PNG at `path`, inside the page; `alt` says what it shows to who cannot see it."""
    data = base64.b64encode(path.read_bytes()).decode()
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"<figure><img alt='{text(alt)}' src='data:image/png;base64,{data}'>{below}</figure>"


def analysis(run: Path) -> list[str]:
    """The figures that scripts/analyze.py left in RUN/analysis, and of which weights they are."""
    folder = run / "analysis"
    pictures = [
        image(path, f"{path.stem.replace('_', ' ')} of {run}", path.stem.replace("_", " "))
        for path in sorted(folder.glob("*.png"))
    ]
    if not pictures:
        return []
    found = runtime.read_record(folder / "analysis.json", ["networks", "command"])
    of = ", ".join(
        f"{name}: {told['weights']} at step {told['step']}" for name, told in found["networks"].items()
    )
    return [f"<h3>{text(of)}</h3>", *pictures, f"<p><code>{text(found['command'])}</code></p>"]


def bullets(lines: Sequence[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>" if lines else ""


def note(sentence: str) -> str:
    """A remark in small type."""
    return f"<p class='note'>{text(sentence)}</p>"


def text(text: str) -> str:
    """Text as HTML shows it."""
    return html.escape(text)
