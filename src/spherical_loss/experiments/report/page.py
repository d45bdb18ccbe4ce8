"""An HTML page that is one file: sections and pictures, with the style inside, and nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from spherical_loss.experiments.report.pictures import Picture

STYLE = Path(__file__).with_name("report.css")


@dataclass(frozen=True)
class Section:
    """A part of the page with its own heading, which the table of contents lists."""

    name: str
    title: str
    body: str


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def pictures(*found: Picture | None) -> str:
    """The pictures that are not None, side by side where the page is wide enough."""
    figures = [f"<figure>\n{p.svg}\n{figure_caption(p)}</figure>" for p in found if p is not None]
    return f'<div class="pictures">\n{"".join(figures)}\n</div>' if figures else ""


def figure_caption(picture: Picture) -> str:
    return f"<figcaption>{escape(picture.caption)}</figcaption>\n" if picture.caption else ""


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
