"""Tables, for the screen and for Markdown files."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

STYLES = {
    "pass": "green",
    "ok": "green",
    "FAIL": "bold red",
    "CONFLICT": "bold red",
    "skipped": "yellow",
    "absent": "yellow",
    "no backward": "yellow",
}
"""How a cell that consists of one of these words looks on the screen."""


@dataclass
class Table:
    """A titled table of strings; the first ``text_columns`` columns are aligned to the left.

    ``note`` stands below it.
    """

    title: str
    columns: Sequence[str]
    text_columns: int = 1
    rows: list[tuple[str, ...]] = field(default_factory=list)
    note: str = ""

    def add(self, *cells: str) -> None:
        """Add a row."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row of {self.title} has {len(self.columns)} cells: {cells}")
        self.rows.append(cells)

    def without_empty_columns(self) -> Table:
        """Return the table without the columns in which no row says anything."""
        kept = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        return Table(
            self.title,
            [self.columns[i] for i in kept],
            sum(i < self.text_columns for i in kept),
            [tuple(row[i] for i in kept) for row in self.rows],
            self.note,
        )

    def show(self) -> None:
        """Print the table, with rich where it is installed."""
        if importlib.util.find_spec("rich") is None:
            print(self.plain())
        else:
            self._show_rich()

    def _show_rich(self) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=self.title,
            box=box.ROUNDED,
            title_style="bold",
            title_justify="left",
            header_style="bold cyan",
        )
        for i, column in enumerate(self.columns):
            left = i < self.text_columns
            table.add_column(
                column, justify="left" if left else "right", overflow="fold", no_wrap=not left
            )
        for row in self.rows:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        console = Console()
        if not console.is_terminal:
            console = Console(width=200)
        console.print(table)
        if self.note:
            console.print(Text(self.note))

    def plain(self) -> str:
        """Return the table as plain text."""
        cells = [tuple(self.columns), *(tuple(c.replace("\n", "; ") for c in r) for r in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [self.title, "-" * len(self.title)]
        lines += [
            "  ".join(
                cell.ljust(width) if i < self.text_columns else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in cells
        ]
        return "\n".join([*lines, *([self.note] if self.note else []), ""])

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ["---" if i < self.text_columns else "---:" for i in range(len(self.columns))]
        rows = [self.columns, rule, *self.rows]
        lines = [
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in row) + " |"
            for row in rows
        ]
        note = self.note.replace("\n", "\n\n")
        return "\n".join([*lines, *(["", note] if note else []), ""])


def progress_bar() -> AbstractContextManager[Progress]:
    """Return a progress bar that leaves no trace when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
