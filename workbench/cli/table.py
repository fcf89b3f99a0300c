"""Named tables as lines to read: one block for each."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from workbench.core.output import plain

ROWS_OF_EACH, ROWS_OF_ALL, LINES_IN_FULL = 6, 20, 40
"""What `overview` shows: rows where there are several tables, rows where there is one, and how much is shown whole."""
NO_VALUE = "–"
_GAP, _MARGIN = "  ", "  "


def overview(tables: Mapping[str, pl.DataFrame], width: int) -> Iterator[str]:
    """Yield lines of at most `width` columns: of each table the first and last rows, and as many columns as fit."""
    one = len(tables) == 1
    for name, table in tables.items():
        option = "--all" if one else f"--part {_quoted(name)}"
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
        values = [f"{_text(c.name)}={elided(_column([c[0]])[0], width // 2)}" for c in same]
        yield from flowed(f"{_MARGIN}in every row: ", values, width)
    if differing:
        yield from _rows(pl.DataFrame(differing), width, limit, option)
    yield ""


def _rows(group: pl.DataFrame, width: int, limit: int | None, option: str) -> Iterator[str]:
    cut = limit is not None and group.height > limit + 1
    half = limit // 2 if limit is not None and cut else 0
    shown = group.head(half).vstack(group.tail(half)) if cut else group
    inside = width - len(_MARGIN)
    columns, blocks = _fitted(shown, inside)
    left_out = []
    if limit is not None and (cut or shown.height * len(blocks) > LINES_IN_FULL):
        left_out = [_text(shown.columns[c]) for block in blocks[1:] for c in block if c not in blocks[0]]
        blocks = blocks[:1]
    elif len(blocks) > 1:  # a row that goes on below is known again by its number
        columns = [_padded("#", range(1, shown.height + 1), inside, inside), *columns]
        blocks = _blocks(columns, inside, _leading(shown) + 1)
    for i, block in enumerate(blocks):
        if i:
            yield ""
        for at, cells in enumerate(zip(*(columns[c] for c in block), strict=True)):
            yield (_MARGIN + _GAP.join(cells)).rstrip()
            if cut and at == half:
                yield f"{_MARGIN}… {group.height - shown.height:,} more; {option} prints all"
    if left_out:
        yield from flowed(f"{_MARGIN}more columns ({option}): ", left_out, width)


def _fitted(rows: pl.DataFrame, width: int) -> tuple[list[list[str]], list[list[int]]]:
    """Return columns and blocks of columns, with text elided further where all columns then stand side by side."""
    found = []
    for limit in (width * 2 // 5, width // 4):
        columns = [_padded(c, rows[c], width, limit) for c in rows.columns]
        found.append((columns, _blocks(columns, width, _leading(rows))))
        if len(found[-1][1]) == 1:
            return found[-1]
    return found[0]


def _leading(rows: pl.DataFrame) -> int:
    """Return how many columns come before the first measured one: they name a row."""
    return next((i for i, c in enumerate(rows.columns) if rows[c].dtype.is_float()), rows.width)


def _blocks(columns: Sequence[Sequence[str]], width: int, leading: int) -> list[list[int]]:
    """Return column numbers that fit side by side, block after block; later blocks repeat the `leading` ones."""
    sizes = [len(c[0]) + len(_GAP) for c in columns]
    while sum(sizes[:leading]) > width // 2:
        leading -= 1
    room = width + len(_GAP)
    blocks: list[list[int]] = [[]]
    for i, size in enumerate(sizes):
        if blocks[-1] and sum(sizes[c] for c in blocks[-1]) + size > room:
            repeated = range(min(leading, i))
            blocks.append(list(repeated) if sum(sizes[c] for c in repeated) + size <= room else [])
        blocks[-1].append(i)
    return blocks


def _padded(name: str, values: Iterable[Any], width: int, limit: int) -> list[str]:
    """Return heading and cells of one column, all of one width: numbers to the right, text to the left.

    The heading is at most `width` long, a cell `limit`.
    """
    values = list(values)
    cells = [elided(_text(name), width), *(elided(text, limit) for text in _column(values))]
    size = max(map(len, cells))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values if v is not None)
    return [c.rjust(size) if numbers else c.ljust(size) for c in cells]


def _column(values: Sequence[Any]) -> list[str]:
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
    """Return text of at most `limit` characters; longer text ends in an ellipsis, after a whole word where possible."""
    if len(text) <= limit:
        return text
    cut = text[: limit - 1]
    if text[limit - 1].isalnum():
        cut = re.sub(r"[^\W_]+$", "", cut) if re.search(r"[\W_]", cut[limit // 2 :]) else cut
    return cut.rstrip() + "…"


def flowed(label: str, items: Sequence[str], width: int) -> Iterator[str]:
    """Yield a list after its label, in lines of at most `width` columns; an item is not divided."""
    below = " " * (len(label) - len(label.lstrip()) + 2)
    line = label
    for i, item in enumerate(items):
        piece = elided(item, width - len(below) - 1) + ("," if i + 1 < len(items) else "")
        if line.strip() and len(line) + len(piece) > width:
            yield line.rstrip()
            line = below
        line += f"{piece} "
    yield line.rstrip()


def _quoted(name: str) -> str:
    return plain(shlex.quote(name))
