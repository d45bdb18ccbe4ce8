"""A table is plain data; here it becomes text: on a terminal, as Markdown, and as HTML."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

FILE_WIDTH = 400  # columns, where the output is a file or a pipe: room for every table
WORDY = 24  # characters: a column with a longer cell is text that may be broken into lines
VERDICTS = ("confirmed", "contradicted", "undecided")
FIGURE = re.compile(r"[-+(]?\d")


@dataclass(frozen=True)
class Table:
    """A title (may be empty), a heading for every column, and the rows; ``align`` has ``l`` or ``r`` for every column.

    Without ``align``, the first column and columns of words are on the left, and columns of figures on the right.

    >>> Table("Losses", ["loss", "error", "test"], [["MSE", "0.9 (0.1)", "paired t"], ["softmax", "-", "-"]]).align
    'lrl'
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""

    def __post_init__(self) -> None:
        if not self.align:
            object.__setattr__(self, "align", "l" + "".join("r" if figures(column) else "l" for column in self.columns[1:]))

    @property
    def columns(self) -> list[list[str]]:
        """The cells of every column, without its heading."""
        return [[row[i] for row in self.rows] for i in range(len(self.header))]

    def select(self, columns: Sequence[int]) -> Table:
        """The same table with these columns, in this order."""
        header, align = [self.header[i] for i in columns], "".join(self.align[i] for i in columns)
        return Table(self.title, header, [[row[i] for i in columns] for row in self.rows], align)

    def transposed(self) -> Table:
        """A row for every column but the first, whose cells become the headings.

        >>> Table("T", ["loss", "error", "epochs"], [["MSE", "1", "2"], ["softmax", "3", "4"]]).transposed().rows
        [['error', '1', '3'], ['epochs', '2', '4']]
        """
        names, *columns = self.columns
        rows = [[heading, *column] for heading, column in zip(self.header[1:], columns, strict=True)]
        return Table(self.title, [self.header[0], *names], rows)


def figures(column: Sequence[str]) -> bool:
    """Whether the column has figures, or nothing yet, rather than words."""
    cells = [cell for cell in column if cell not in ("", "-")]
    return 2 * sum(FIGURE.match(cell) is not None for cell in cells) >= len(cells)


# The terminal


def output_console(quiet: bool = False) -> Console:
    """Standard output: as wide as the terminal, or as ``COLUMNS`` says; a file has room for every table."""
    console = Console(quiet=quiet)
    if console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    return Console(width=int(columns) if columns.isdigit() else FILE_WIDTH, quiet=quiet, force_terminal=False)


def show(table: Table, console: Console | None = None) -> None:
    console = console or output_console()
    console.print(_rich(table), highlight=False, markup=False)


def width(table: Table, console: Console) -> int:
    """The columns of a terminal that the table needs to have every cell on one line."""
    return Measurement.get(console, console.options.update(max_width=10_000), _rich(table)).maximum


def _rich(table: Table) -> RichTable:
    found = RichTable(title=table.title or None, title_justify="left")
    for heading, side in zip(table.header, table.align, strict=True):
        found.add_column(heading, justify="left" if side == "l" else "right")
    for row in table.rows:
        found.add_row(*row)
    return found


# Markdown


def markdown(table: Table) -> str:
    """
    >>> print(markdown(Table("Losses", ["loss", "error"], [["softmax of |o|", "0.9"]])))
    **Losses**
    <BLANKLINE>
    | loss | error |
    |---|--:|
    | softmax of \\|o\\| | 0.9 |
    """
    rule = "".join("---|" if side == "l" else "--:|" for side in table.align)
    lines = [f"**{table.title}**\n"] if table.title else []
    return "\n".join([*lines, _markdown_row(table.header), f"|{rule}", *(_markdown_row(row) for row in table.rows)])


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


# HTML


def html(table: Table) -> str:
    """The table in its own container, which scrolls if the table is wider than the page.

    Every cell carries its heading, so that a style sheet can show a row as a list where the page is narrow.
    """
    wordy = [any(len(cell) > WORDY for cell in column) for column in table.columns]
    looks = [_look(side, words) for side, words in zip(table.align, wordy, strict=True)]
    head = "".join(f'<th scope="col"{look}>{escape(title)}</th>' for title, look in zip(table.header, looks, strict=True))
    body = ""
    for first, *others in table.rows:
        cells = "".join(
            f'<td{look} data-heading="{escape(heading)}">{_cell(text)}</td>'
            for text, look, heading in zip(others, looks[1:], table.header[1:], strict=True)
        )
        body += f'<tr><th scope="row"{looks[0]}>{escape(first)}</th>{cells}</tr>\n'
    caption = f"<caption>{escape(table.title)}</caption>\n" if table.title else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.title or table.header[0])}">\n'
        f'<table class="rows">\n{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>'
    )


def _look(side: str, wordy: bool) -> str:
    return ' class="text"' if wordy else ' class="left"' if side == "l" else ""


def _cell(text: str) -> str:
    """
    >>> _cell("0.9"), _cell("confirmed"), _cell("lr < 3")
    ('0.9', '<span class="confirmed">confirmed</span>', 'lr &lt; 3')
    """
    return f'<span class="{text}">{text}</span>' if text in VERDICTS else escape(text)
