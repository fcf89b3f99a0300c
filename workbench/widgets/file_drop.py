"""A place in a notebook to drop a file of any size on; ipywidgets' upload takes no drop, and no file above 10 MiB."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

STATIC = Path(__file__).parent / "static"
MAX_BYTES = 8 << 30


class FileDrop(anywidget.AnyWidget):
    """Hands a dropped or chosen file to `on_file(path, name)`; the file is gone when that returns.

    Args:
        on_file: called with the path of the copy and the name that the browser gave; a ValueError it raises is shown.
        label: what is asked for.
        accept: suffixes offered by the file dialogue, ``.json,.gz``.
    """

    _esm = STATIC / "drop.js"
    _css = STATIC / "drop.css"
    label = traitlets.Unicode().tag(sync=True)
    accept = traitlets.Unicode().tag(sync=True)

    def __init__(self, on_file: Callable[[Path, str], Any], *, label: str = "a file", accept: str = "") -> None:
        super().__init__(label=label, accept=accept)
        self._on_file = on_file
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._got = 0
        self._file: tuple[str, int] | None = None
        self.on_msg(self._received)

    def _received(self, _: Any, content: Any, buffers: Any) -> None:
        try:
            self.take(content, buffers)
        except Exception as error:  # without an answer the page would wait for ever
            self._close()
            self.send({"error": str(error) or type(error).__name__})
            if not isinstance(error, (ValueError, OSError)):
                raise
        else:
            self.send({"error": None})

    def take(self, content: Any, buffers: Any) -> None:
        """Take the next piece of a file: ``at`` (its offset), ``size`` (of the file), ``name``, and one buffer.

        Raises:
            ValueError: the pieces do not follow each other or are of two files, or the file is larger than `MAX_BYTES`.
        """
        at, size, name = content["at"], content["size"], str(content["name"])
        piece = bytes(buffers[0])
        if not 0 <= size <= MAX_BYTES:
            raise ValueError(f"expected at most {MAX_BYTES} bytes, got {size}; give its path instead")
        if at == 0:
            self._close()
            self._folder, self._file = tempfile.TemporaryDirectory(prefix="dropped-"), (name, size)
        # A widget may be shown twice, and take a drop in both places.
        if self._folder is not None and (name, size) != self._file:
            raise ValueError(f"two files at once: expected a piece of {self._file}, got one of {(name, size)}")
        if self._folder is None or at != self._got or at + len(piece) > size:
            raise ValueError(f"the pieces do not follow each other: {len(piece)} bytes at {at}, had {self._got}")
        suffix = Path(name).suffix
        path = Path(self._folder.name) / f"dropped{suffix if suffix[1:].isalnum() else ''}"
        with path.open("ab") as f:
            f.write(piece)
        self._got += len(piece)
        if self._got == size:
            try:
                self._on_file(path, name)
            finally:
                self._close()

    def _close(self) -> None:
        self._got = 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
