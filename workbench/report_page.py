"""The report page of a run: one self-contained HTML file."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.plotting import SOURCE_COLOURS
from workbench.suite.verdict import STANDINGS, standing

ORDER = ("failed", "claim_failed", "interrupted", "passed", "skipped")
LABELS = {
    "failed": "failed",
    "claim_failed": "claim failed",
    "interrupted": "interrupted",
    "skipped": "skipped",
    "passed": "passed",
}
FOLDER = "notebooks"


def write_page(out: Path, summary: Mapping[str, Any], *, thumbnails: bool = True) -> Path:
    """Write ``index.html`` into `out` for a run's summary and return its path.

    Args:
        out: the run's folder; the executed notebooks lie in ``notebooks/``.
        summary: contents of ``run.json``.
        thumbnails: draw the main figures that have no picture yet.
    """
    from workbench.suite.thumbnails import draw

    executed = [out / FOLDER / f"{o['slug']}.ipynb" for o in summary["notebooks"] if o["attempts"]]
    executed = [p for p in executed if p.is_file()]
    reasons = draw(executed) if thumbnails else {}
    page = out / "index.html"
    temporary = out / ".index.html.tmp"
    temporary.write_text(render(out, summary, reasons), encoding="utf-8")
    os.replace(temporary, page)
    return page


def render(out: Path, summary: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return the page's HTML; every string of a notebook is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "mib": mib, "figure": figure_text}
    cards = sorted((_card(out, o, reasons) for o in summary["notebooks"]), key=lambda c: ORDER.index(c["status"]))
    standings = [c["standing"] for card in cards for c in card["claims"]]
    return environment.get_template("report.html.j2").render(
        run=summary,
        cards=cards,
        labels=LABELS,
        words={"held": "claims held", "failed": "claims failed", "differs": "known to differ", "n/a": "not applicable"},
        marks={"held": "✓", "failed": "✗", "differs": "≠", "n/a": "–"},
        source_colours=SOURCE_COLOURS,
        statuses=[s for s in ORDER if any(c["status"] == s for c in cards)],
        sources=sorted({c["source"] for c in cards if c["source"]}),
        standings={s: standings.count(s) for s in ("held", "failed", "differs", "n/a")},
    )


def _card(out: Path, outcome: Mapping[str, Any], reasons: Mapping[str, str]) -> dict[str, Any]:
    from workbench.suite.thumbnails import picture_of

    slug = outcome["slug"]
    notebook = out / FOLDER / f"{slug}.ipynb"
    ran = outcome["attempts"] > 0 and outcome["status"] != "interrupted"
    picture = picture_of(notebook) if ran else None
    kind = "webp" if picture and picture.suffix == ".webp" else "png"
    claims = [{"known": "", **c, "standing": standing(c)} for c in outcome["checks"]]
    return {
        **outcome,
        "reused": outcome.get("reused", False),
        "claims": sorted(claims, key=lambda c: STANDINGS.index(c["standing"])),
        "picture": f"data:image/{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}" if picture else None,
        "no_picture": reasons.get(slug, "no figure was drawn"),
        "ipynb": f"{FOLDER}/{slug}.ipynb" if ran and notebook.is_file() else None,
        "html": f"{FOLDER}/{slug}.html" if ran and notebook.with_suffix(".html").is_file() else None,
    }


def duration(seconds: float) -> str:
    """Return seconds as text for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def mib(size_bytes: int) -> str:
    """Return a size in MiB as text."""
    return f"{size_bytes / 2**20:.0f} MiB"


def figure_text(value: Any) -> str:
    """Return the figure that decided a claim as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
