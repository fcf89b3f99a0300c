"""Exact nanoseconds from the digits of JSON numbers in microseconds; doubles lose them."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

_INT64 = 1 << 63
LARGEST = 1 << 62  # a start and a duration of this size still add up within int64


def parse_us(raws: list[Any]) -> np.ndarray:
    """Nanoseconds (int64) of JSON numbers in microseconds, from their digits; unusable ones become int64 minimum."""
    n = len(raws)
    bad = np.iinfo(np.int64).min
    if not n:
        return np.empty(0, np.int64)
    text = np.frombuffer(b",".join(raws) + b",", np.uint8)
    ends = np.flatnonzero(text == 44)
    if len(ends) != n:
        return np.array([_slow_us(bytes(r)) for r in raws], np.int64)
    starts = np.concatenate(([0], ends[:-1] + 1))
    value = text - np.uint8(48)
    is_digit = value < 10
    digits = np.cumsum(is_digit, dtype=np.int32)
    digits_to_end = digits[ends]
    number = np.diff(digits_to_end, prepend=np.int32(0))
    row = np.repeat(np.arange(n, dtype=np.int32), ends - starts + 1)
    place = digits_to_end[row] - digits
    minus = text == 45
    dot = text == 46
    dots = np.flatnonzero(dot)
    decimals = np.zeros(n, np.int32)
    decimals[row[dots]] = digits_to_end[row[dots]] - digits[dots]
    odd = np.zeros(n, bool)
    odd[row[~(is_digit | minus | dot | (text == 44))]] = True
    whole = number - decimals
    odd |= (number == 0) | (decimals > 3) | (whole > 16)  # so at most 19 digits: within int64
    minus_at = np.flatnonzero(minus)
    negative = np.zeros(n, bool)
    negative[row[minus_at]] = True
    odd[row[minus_at[minus_at != starts[row[minus_at]]]]] = True
    # 16 digits of microseconds are within LARGEST only below 4.6e15; a minus takes the slow way there as well.
    odd |= (whole == 16) & (value[starts] >= 4)
    powers = 10 ** np.arange(19, dtype=np.int64)
    parts = np.where(is_digit, value, 0) * powers[np.minimum(place, 18)]
    total = np.add.reduceat(parts, starts) * powers[3 - np.minimum(decimals, 3)]
    total[negative] *= -1
    for i in np.flatnonzero(odd):
        total[i] = _slow_us(bytes(raws[i]))
    total[np.flatnonzero(odd & (total == bad))] = bad
    return total


def _slow_us(raw: bytes) -> int:
    text = raw.strip().strip(b'"').decode("ascii", "replace")
    bad = -_INT64
    if len(text) > 64:
        return bad
    try:
        number = Decimal(text)
        if not number.is_finite() or number.adjusted() > 15:
            return bad
        value = int((number * 1000).to_integral_value())
        return value if abs(value) < LARGEST else bad
    except (InvalidOperation, ValueError):
        return bad
