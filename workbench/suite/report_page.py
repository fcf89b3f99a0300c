"""The report page of a run: one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.core.files import replace_file
from workbench.core.record import counted
from workbench.suite.catalog import GROUPS
from workbench.suite.generated import HEADINGS
from workbench.suite.pages import FOLDER, rendered
from workbench.suite.thumbnails import dark_of, draw, picture_of
from workbench.suite.verdict import STANDINGS, standing

ORDER = ("failed", "claim_failed", "interrupted", "passed", "skipped")
LABELS = {status: status.replace("_", " ") for status in ORDER}


def write_page(out: Path, summary: Mapping[str, Any], *, thumbnails: bool = True) -> Path:
    """Write ``index.html`` into `out` for a run's summary and return its path.

    Args:
        out: the run's folder; the executed notebooks lie in ``notebooks/``.
        summary: contents of ``run.json``.
        thumbnails: draw the main figures that have no picture yet.
    """
    executed = [out / FOLDER / f"{o['slug']}.ipynb" for o in summary["notebooks"] if o["attempts"]]
    executed = [p for p in executed if p.is_file()]
    reasons = draw(executed) if thumbnails else {}
    page = out / "index.html"
    replace_file(page, render(out, summary, reasons))
    return page


def render(out: Path, summary: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return the page's HTML; every string of a notebook is escaped."""
    cards = [_card(out, o, reasons) for o in summary["notebooks"]]
    no_result = [c for c in cards if c["status"] in ("failed", "interrupted", "skipped")]
    return rendered(
        "report",
        {"duration": duration, "figure": figure_text, "machine": machine_text},
        run=summary,
        cards=cards,
        sections=_sections(cards),
        labels=LABELS,
        words={"held": "claims held", "differs": "known to differ", "failed": "claims failed", "n/a": "not decided"},
        marks={"held": "✓", "failed": "✗", "differs": "≠", "n/a": "–"},
        statuses=[s for s in ORDER if any(c["status"] == s for c in cards)],
        sources=sorted({c["source"] for c in cards if c["source"]}),
        standings=_standings(cards),
        listed={s: [(card, c) for card in cards for c in card["claims"] if c["standing"] == s] for s in STANDINGS},
        no_result=sorted(no_result, key=lambda c: ORDER.index(c["status"])),
    )


def _sections(cards: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the cards under the headings of the notebook index, in its order."""
    found = {card["group"] for card in cards}
    sections = []
    for group in (*(g for g in GROUPS if g in found), *sorted(found - set(GROUPS))):
        mine = [card for card in cards if card["group"] == group]
        heading = HEADINGS.get(group, group)
        sections.append({"id": f"section-{group}", "heading": heading, "cards": mine, "standings": _standings(mine)})
    return sections


def _standings(cards: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    found = [c["standing"] for card in cards for c in card["claims"]]
    return {s: found.count(s) for s in ("held", "differs", "failed", "n/a")}


def _card(out: Path, outcome: Mapping[str, Any], reasons: Mapping[str, str]) -> dict[str, Any]:
    slug = outcome["slug"]
    notebook = out / FOLDER / f"{slug}.ipynb"
    ran = outcome["attempts"] > 0 and outcome["status"] != "interrupted"
    picture = picture_of(notebook) if ran else None
    dark = dark_of(picture) if picture else None
    claims = [{"known": "", **c, "standing": standing(c)} for c in outcome["checks"]]
    return {
        **outcome,
        "reused": outcome.get("reused", False),
        "claims": sorted(claims, key=lambda c: STANDINGS.index(c["standing"])),
        "picture": _inline(picture) if picture else None,
        "dark_picture": _inline(dark) if dark and dark.is_file() else None,
        "no_picture": reasons.get(slug, "no figure was drawn"),
        "ipynb": f"{FOLDER}/{slug}.ipynb" if ran and notebook.is_file() else None,
        "html": f"{FOLDER}/{slug}.html" if ran and notebook.with_suffix(".html").is_file() else None,
    }


def _inline(picture: Path) -> str:
    return f"data:image/{picture.suffix[1:]};base64,{base64.b64encode(picture.read_bytes()).decode()}"


def duration(seconds: float) -> str:
    """Return seconds as text for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def machine_text(machine: Mapping[str, Any]) -> str:
    """Return a machine in one line: GPUs, processor, memory, system, Python."""
    memory = f", {machine['memory_MiB'] / 1024:.0f} GiB" if machine["memory_MiB"] else ""
    processor = f"{machine['cpu'] or 'unknown processor'}, {machine['cores']} cores{memory}"
    return f"{counted(machine['gpus']) or 'no GPU'}; {processor}; {machine['system']}, Python {machine['python']}"


def figure_text(value: Any) -> str:
    """Return the figure that decided a claim as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
