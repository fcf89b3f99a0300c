"""Draws the main figures of executed notebooks as small images for light and dark pages, all in one browser.

They are drawn in a process of its own that leaves at a time limit, so that a browser that hangs or is absent costs the
pictures and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.core.files import replace_file
from workbench.views.contrast import themed

PLOTLY_MIME = "application/vnd.plotly.v1+json"
WIDTH = 760


def draw(notebooks: Sequence[Path], timeout_s: float | None = None) -> dict[str, str]:
    """Write ``<slug>.webp`` and ``<slug>.dark.webp`` (or one ``.png``) beside each executed notebook.

    Returns slug to reason for those without.
    A picture that is newer than its notebook stays.
    """
    missing: dict[str, str] = {}
    wanted: dict[Path, Any] = {}
    for notebook in notebooks:
        picture = picture_of(notebook)
        if picture and picture.stat().st_mtime >= notebook.stat().st_mtime:
            continue
        for ending in (".webp", ".dark.webp", ".png"):
            notebook.with_suffix(ending).unlink(missing_ok=True)
        try:
            figure = main_figure(notebook)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            missing[notebook.stem] = "the executed notebook cannot be read"
            continue
        if figure is None:
            missing[notebook.stem] = "the notebook shows no figure"
        elif isinstance(figure, bytes):
            replace_file(notebook.with_suffix(".png"), figure)
        else:
            wanted[notebook.with_suffix(".webp")] = figure
    return missing | _draw_in_process(wanted, timeout_s or 40 + 5 * len(wanted))


def picture_of(notebook: Path) -> Path | None:
    """Return the picture beside an executed notebook, if there is one."""
    return next((p for e in (".webp", ".png") if (p := notebook.with_suffix(e)).is_file()), None)


def dark_of(picture: Path) -> Path:
    """Return where a picture for dark pages lies, or would lie, beside the one for light pages."""
    return picture.with_suffix(f".dark{picture.suffix}")


def main_figure(notebook: Path) -> dict[str, Any] | bytes | None:
    """Return the first figure among the outputs: plotly JSON, or the bytes of a PNG."""
    for cell in json.loads(notebook.read_bytes())["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if PLOTLY_MIME in data:
                return data[PLOTLY_MIME]
            if "image/png" in data:
                return base64.b64decode("".join(data["image/png"]))
    return None


def _draw_in_process(wanted: Mapping[Path, Any], timeout_s: float) -> dict[str, str]:
    if not wanted:
        return {}
    with tempfile.TemporaryDirectory(prefix="wb-pictures-", ignore_cleanup_errors=True) as name:
        job, answer = Path(name) / "job.json", Path(name) / "reasons.json"
        job.write_text(json.dumps([timeout_s, {str(path): figure for path, figure in wanted.items()}]))
        command = [sys.executable, "-m", "workbench.suite.thumbnails", name]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        # Not killed when a signal ends the wait: it sees that nobody asks any more, and takes its browser with it.
        subprocess.Popen(command, env={**os.environ, "TMPDIR": name}, **quiet).wait()
        reasons = json.loads(answer.read_bytes()) if answer.is_file() else {}
    ended = "the drawing process ended early"
    return {path.stem: reasons.get(str(path), ended) for path in wanted if not path.is_file()}


def main(folder: Path) -> None:
    """Draw the figures of ``job.json``, or leave at its limit or with the process that asked; ``reasons.json`` says why
    any of them is missing."""
    timeout_s, wanted = json.loads((folder / "job.json").read_bytes())
    reasons = dict.fromkeys(wanted, f"drawing took more than {timeout_s:g} s")

    def leave() -> None:
        import psutil

        with contextlib.suppress(OSError):  # whoever asked may be gone, with the folder
            replace_file(folder / "reasons.json", json.dumps(reasons))
        for member in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                member.kill()
        os._exit(0)  # a browser that hangs also holds the interpreter's own end

    def watch(asked: int = os.getppid(), end: float = time.monotonic() + timeout_s) -> None:
        while time.monotonic() < end and os.getppid() == asked:
            time.sleep(0.2)
        leave()

    threading.Thread(target=watch, daemon=True).start()
    try:
        asyncio.run(_draw_all(wanted, reasons))
    except Exception as error:
        reasons |= dict.fromkeys(wanted, _why(error))
    finally:
        leave()


async def _draw_all(wanted: Mapping[str, Any], reasons: dict[str, str]) -> None:
    import kaleido

    async with kaleido.Kaleido(n=1) as browser:
        for path, drawn in wanted.items():
            layout = drawn.get("layout", {})
            width, height = layout.get("width") or WIDTH, layout.get("height") or 430
            options: Any = {"format": "webp", "width": width, "height": height, "scale": min(2.0, WIDTH / width)}
            try:
                # The light one last: it is what says that the pictures are there.
                for theme, target in (("dark", dark_of(Path(path))), ("light", Path(path))):
                    figure: Any = themed(drawn, theme)
                    replace_file(target, await browser.calc_fig(figure, opts=options))
            except Exception as error:
                reasons[path] = _why(error)


def _why(error: Exception) -> str:
    text = " ".join(str(error).split())[:160]
    if "chrome" in text.lower() or "browser" in f"{type(error).__name__} {text}".lower():
        return "no Chromium or Chrome was found to draw it"
    return f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
