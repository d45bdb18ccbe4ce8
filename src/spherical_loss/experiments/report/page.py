"""An HTML page that is one file: sections, tables and pictures, with the style inside, and nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from spherical_loss.experiments.report.pictures import Picture

STYLE = Path(__file__).with_name("report.css")
WORDY = 24  # characters: a column with a longer cell is text, not figures
VERDICTS = ("confirmed", "contradicted", "undecided")


@dataclass(frozen=True)
class Section:
    """A part of the page with its own heading, which the table of contents lists."""

    name: str
    title: str
    body: str


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in its own container, which scrolls if the table is wider than the page."""
    wordy = [any(len(row[i]) > WORDY for row in rows) for i in range(len(headings))]
    head = "".join(
        f'<th scope="col"{text_class(words)}>{escape(title)}</th>' for title, words in zip(headings, wordy, strict=True)
    )
    body = ""
    for first, *others in rows:
        cells = "".join(cell(text, words) for text, words in zip(others, wordy[1:], strict=True))
        body += f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>\n'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">\n<table>\n'
        f"<caption><span>{escape(caption)}</span></caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>"
    )


def text_class(wordy: bool) -> str:
    return ' class="text"' if wordy else ""


def cell(text: str, wordy: bool = False) -> str:
    """
    >>> cell("0.9"), cell("confirmed"), cell("lr < 3", wordy=True)
    ('<td>0.9</td>', '<td><span class="confirmed">confirmed</span></td>', '<td class="text">lr &lt; 3</td>')
    """
    inner = f'<span class="{text}">{text}</span>' if text in VERDICTS else escape(text)
    return f"<td{text_class(wordy)}>{inner}</td>"


def pictures(*found: Picture | None) -> str:
    """The pictures that are not None, side by side where the page is wide enough."""
    figures = [f"<figure>\n{p.svg}\n<figcaption>{escape(p.caption)}</figcaption>\n</figure>" for p in found if p is not None]
    return f'<div class="pictures">\n{"".join(figures)}\n</div>' if figures else ""


def details(summary: str, body: str) -> str:
    return f"<details>\n<summary>{escape(summary)}</summary>\n{body}\n</details>"


def from_markdown(text: str) -> str:
    """Markdown written by hand, with its headings two levels down, since they are parts of a section."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
    html: str = parser.renderer.render(tokens, parser.options, {})
    return html.replace("<table>", '<div class="scroll" role="region" tabindex="0" aria-label="table"><table>').replace(
        "</table>", "</table></div>"
    )


def page(title: str, introduction: str, sections: Sequence[Section]) -> str:
    contents = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>\n' for s in sections)
    bodies = "".join(f'<section id="{s.name}">\n<h2>{escape(s.title)}</h2>\n{s.body}\n</section>\n' for s in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{introduction}
</header>
<nav aria-label="Contents">
<h2>Contents</h2>
<ol>
{contents}</ol>
</nav>
<main>
{bodies}</main>
</body>
</html>
"""
