"""One self-contained HTML page: no network, light and dark, from a phone to a desk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fdfdfc; --soft: #6b7076; --line: #dcdedf; --wash: #f1f3f4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e5e8; --paper: #16181b; --soft: #9aa0a6; --line: #34383c; --wash: #1f2226; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .4rem; }
p, ul { max-width: 44rem; margin: .5rem 0; }
.lead { font-size: 1.12rem; }
.panels { display: grid; gap: .8rem 1.2rem; margin: .8rem 0; overflow-x: auto;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, calc(58rem / var(--across))), 1fr)); }
.strip { grid-template-columns: repeat(var(--across), minmax(5.5rem, 1fr)); gap: .2rem .5rem; }
.panels svg { width: 100%; max-width: 30rem; height: auto; font-family: inherit; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; }
td:not(:first-child), th:not(:first-child) { font-variant-numeric: tabular-nums; }
.facts td { white-space: normal; }
.facts td:first-child { color: var(--soft); white-space: nowrap; }
code { background: var(--wash); padding: .1rem .3rem; border-radius: .25rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Section:
    """A heading, what there is to see in words, and a list, a table or panels that show it."""

    title: str
    text: str
    panels: Sequence[str] = ()
    """Inline SVG."""
    items: Sequence[str] = ()
    """Of a list."""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    across: int = 3
    """Panels beside each other where there is room."""
    strip: bool = False
    """Keep the panels in rows of `across` on narrow screens too, to be scrolled sideways."""


def page(title: str, lead: str, sections: Sequence[Section], facts: Mapping[str, str]) -> str:
    """The page as one string; every text is escaped, only panels are taken as they are."""
    body = "\n".join(_section(section) for section in sections)
    listed = "".join(f"<tr><td>{escape(name)}</td><td>{_fact(name, value)}</td></tr>" for name, value in facts.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{body}
<h2>How to get these numbers again</h2>
<div class="scroll"><table class="facts">{listed}</table></div>
</body>
</html>
"""


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{escape(section.text)}</p>"]
    if section.items:
        parts.append(f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in section.items)}</ul>")
    if section.rows:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in section.columns)
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows)
        parts.append(f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>')
    if section.panels:
        kind = "panels strip" if section.strip else "panels"
        parts.append(f'<div class="{kind}" style="--across: {section.across}">{"".join(section.panels)}</div>')
    return "\n".join(parts)


def _fact(name: str, value: str) -> str:
    return f"<code>{escape(value)}</code>" if name in {"command", "commit"} else escape(value)
