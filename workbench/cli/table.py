"""Named tables as lines to read: one block for each, laid out by rich."""

from __future__ import annotations

import io
import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.core.output import plain

ROWS_OF_EACH, ROWS_OF_ALL, LINES_IN_FULL = 6, 20, 40
"""What `overview` shows: rows where there are several tables, rows where there is one, and how much is shown whole."""
NO_VALUE = "–"
_GAP = 2


def overview(tables: Mapping[str, pl.DataFrame], width: int) -> Iterator[str]:
    """Yield lines of at most `width` columns: of each table the first and last rows, and as many columns as fit."""
    one = len(tables) == 1
    for name, table in tables.items():
        option = "--all" if one else f"--part {plain(shlex.quote(name))}"
        yield from _titled("" if one else name, table, width, ROWS_OF_ALL if one else ROWS_OF_EACH, option)


def whole(tables: Mapping[str, pl.DataFrame], width: int, only: str | None = None) -> Iterator[str]:
    """Yield lines with every row and column, of the table `only` where one is named; wide tables continue below.

    Raises:
        KeyError: there is no such table.
    """
    for name, table in tables.items() if only is None else [(only, tables[only])]:
        yield from _titled("" if len(tables) == 1 else name, table, width)


def _titled(name: str, group: pl.DataFrame, width: int, limit: int | None = None, option: str = "") -> Iterator[str]:
    """Yield one table's title, what is the same in all its rows, and its rows; `limit` bounds rows and columns."""
    title = f"{plain(name)}: " if name else ""
    yield f"{title}{group.height:,} row{'s' * (group.height != 1)}"
    columns = [c for c in group.get_columns() if any(map(_has_value, c))]
    same = [c for c in columns if len(c) > 1 and c.n_unique() == 1]
    differing = [c for c in columns if len(c) == 1 or c.n_unique() > 1]
    if same:
        values = [f"{_text(c.name)}={elided(_cells([c[0]])[0], width // 2)}" for c in same]
        yield from flowed("  in every row: ", values, width)
    if differing:
        yield from _rows(pl.DataFrame(differing), width, limit, option)
    yield ""


def _rows(group: pl.DataFrame, width: int, limit: int | None, option: str) -> Iterator[str]:
    cut = limit is not None and group.height > limit + 1
    half = limit // 2 if limit is not None and cut else 0
    shown = group.head(half).vstack(group.tail(half)) if cut else group
    columns = [_column(c, width * 2 // 5) for c in shown.get_columns()]
    narrow = [_column(c, width // 4) for c in shown.get_columns()]
    if sum(c.width for c in columns) > width >= sum(c.width for c in narrow):
        columns = narrow
    # Columns before the first measured one name a row; below they come again.
    names = columns[: next((i for i, c in enumerate(shown.dtypes) if c.is_float()), len(columns))]
    blocks = _blocks(columns, names, width)
    left_out = []
    if limit is not None and (cut or shown.height * len(blocks) > LINES_IN_FULL):
        left_out = [c.name for block in blocks[1:] for c in block if c not in blocks[0]]
        blocks = blocks[:1]
    elif len(blocks) > 1:  # a row that goes on below is known again by its number
        number = _column(pl.Series("#", range(1, shown.height + 1)), width)
        blocks = _blocks([number, *columns], [number, *names], width)
    for i, block in enumerate(blocks):
        if i:
            yield ""
        table = Table(box=None, padding=(0, 0, 0, _GAP))
        for c in block:
            justify = "right" if c.numbers else "left"
            table.add_column(c.name, justify=justify, no_wrap=True, overflow="ellipsis", max_width=c.width - _GAP)
        for row in zip(*(c.cells for c in block)):
            table.add_row(*map(Text, row))
        for at, line in enumerate(rendered(table, width)):
            yield line
            if cut and at == half:
                yield f"  … {group.height - shown.height:,} more; {option} prints all"
    if left_out:
        yield from flowed(f"  more columns ({option}): ", left_out, width)


class _Column(NamedTuple):
    """Heading and cells of a column as text, and how much of a line it takes; numbers stand to the right."""

    name: str
    cells: list[str]
    width: int
    numbers: bool


def _column(values: pl.Series, most: int) -> _Column:
    """Return a column whose cells take at most `most`."""
    name, cells = _text(values.name), _cells(values.to_list())
    size = max(cell_len(name), min(most, max(map(cell_len, cells))))
    return _Column(name, cells, size + _GAP, values.dtype.is_numeric())


def _blocks(columns: list[_Column], names: list[_Column], room: int) -> list[list[_Column]]:
    """Return columns that fit side by side, block after block; later blocks repeat those that name a row."""
    while sum(c.width for c in names) > (room - _GAP) // 2:
        names = names[:-1]
    blocks: list[list[_Column]] = [[]]
    for column in columns:
        if blocks[-1] and sum(c.width for c in blocks[-1]) + column.width > room:
            blocks.append(list(names) if sum(c.width for c in names) + column.width <= room else [])
        blocks[-1].append(column)
    return blocks


def rendered(table: Table, width: int) -> Iterator[str]:
    """Yield a table's lines, at most `width` columns wide, without colours or spaces at their ends."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().split("\n")[:-1]:
        yield line.rstrip()


def _cells(values: Sequence[Any]) -> list[str]:
    return rounded(values) if any(isinstance(v, float) for v in values) else [_text(v) for v in values]


def _text(value: Any) -> str:
    if not _has_value(value):
        return NO_VALUE
    return str(value).lower() if isinstance(value, bool) else " ".join(plain(value).split())


def _has_value(value: Any) -> bool:
    return value is not None and value != "" and value == value  # NaN is no value, as in JSON


def rounded(values: Sequence[float | None]) -> list[str]:
    """Return numbers with as many decimals as the column needs: the largest to four digits, the smallest to three.

    Where they lie more than three decades apart or below 0.0001, each number is rounded to four digits by itself.
    Digits before the point are never rounded away.
    """
    sizes = [abs(v) for v in values if v is not None and math.isfinite(v) and v != 0]
    whole_numbers = all(v == int(v) for v in sizes)
    least, most = (math.floor(math.log10(f(sizes))) if sizes else 0 for f in (min, max))
    decimals = 0 if whole_numbers else max(0, 3 - most, 2 - least)
    while decimals and all(round(v, decimals - 1) == v for v in sizes):
        decimals -= 1
    aligned = whole_numbers or (most - least <= 3 and least >= -4)

    def one(value: float) -> str:
        if aligned or not math.isfinite(value) or abs(value) >= 1000:
            return f"{value:.{decimals if aligned else 0}f}"
        return f"{value:.4g}"

    return [NO_VALUE if v is None or math.isnan(v) else one(v) for v in values]


def elided(text: str, limit: int) -> str:
    """Return text of at most `limit` columns; longer text ends in an ellipsis."""
    short = Text(text)
    short.truncate(limit, overflow="ellipsis")
    return short.plain


def flowed(label: str, items: Sequence[str], width: int) -> list[str]:
    """Return a list after its label, in lines of at most `width` characters; an item that fits is not divided."""
    whole = ", ".join(item.replace(" ", "\xa0") for item in items)
    below = " " * (len(label) - len(label.lstrip()) + 2)
    lines = textwrap.wrap(f"{label}{whole}", width, subsequent_indent=below, break_on_hyphens=False)
    return [line.replace("\xa0", " ").rstrip() for line in lines]
