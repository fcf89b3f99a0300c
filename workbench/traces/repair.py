"""Mending damaged JSON text: bad escapes, control characters, invalid UTF-8, NaN; what follows a value.

Numbers keep the digits they were written with.
"""

from __future__ import annotations

import json
import re
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_ESCAPE = re.compile(r'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')
"""A good escape, kept whole so that its second backslash begins no other; or a bad one's backslash."""
_BAD_NUMBER = re.compile(r":\s*[-+]?(?:nan|inf|infinity)\b", re.IGNORECASE)


class _Text(str):
    """Digits of a JSON number, kept as written."""


_JSON = json.JSONDecoder(strict=False, parse_float=_Text, parse_int=_Text, parse_constant=lambda _: None)
_SPACE = re.compile(r"[ \t\r\n,]*")


def _dump(value: Any) -> bytes:
    """JSON bytes of a decoded event, numbers with the digits they had."""
    if isinstance(value, _Text):
        return value.encode()
    if isinstance(value, dict):
        return b"{" + b",".join(_dump(str(k)) + b":" + _dump(v) for k, v in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(_dump, value)) + b"]"
    if isinstance(value, str):  # lone surrogates have no UTF-8
        value = value.encode("utf-8", "replace").decode()
    return json.dumps(value).encode()


def mend(piece: bytes) -> str:
    """The text of damaged JSON as valid as it can be made."""
    text = _CONTROL.sub("\ufffd", piece.decode("utf-8", "replace"))
    return _BAD_NUMBER.sub(": null", _ESCAPE.sub(lambda m: m[1] or r"\\", text))


def skip_strays(text: str) -> tuple[int, str]:
    """(items that are no events, the text from the list's end or from what is not JSON; empty where all was read)."""
    found = at = 0
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text) or text[at] == "]":
            return found, text[at:]
        try:
            _, at = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found, text[at:]
        found += 1


def first_value(piece: bytes) -> tuple[bytes, bool, str]:
    """(JSON bytes of the first value in damaged text, was it mended, the text after it).

    Raises:
        ValueError: it cannot be mended.
        RecursionError: it is nested too deeply.
    """
    mended = mend(piece)
    raw, stop = _JSON.raw_decode(mended)
    whole = mended[:stop]
    changed = "\ufffd" in whole or whole.encode() != piece[: len(whole.encode())]
    return _dump(raw), changed, mended[stop:]
