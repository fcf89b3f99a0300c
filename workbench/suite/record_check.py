"""Every recording and every pin of an experiment, checked."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.core.record import check_recording, data_root


def check_all(root: Path | None = None) -> dict[str, list[str]]:
    """Check every recording and every pin; ``slug/name`` (or the experiment's slug) -> what is wrong.

    A pin must name a recording that is there and was made from a clean tree.
    """
    from workbench.experiments import load, slugs

    root = root or data_root() / "recorded"
    found = {f"{p.parent.name}/{p.name}": check_recording(p) for p in sorted(root.glob("*/*/"))}
    for slug in slugs():
        try:
            pin = load(slug).recording
        except Exception as error:  # a broken experiment must not hide the state of the recordings
            found[slug] = [f"its experiment cannot be loaded, so its pin is unknown: {type(error).__name__}: {error}"]
            continue
        if pin is None:
            continue
        key = f"{slug}/{pin}"
        if key not in found:
            found[key] = [f"pinned by {slug}, but not present"]
        elif "-dirty" in pin or _says_dirty(root / slug / pin):
            found[key].append(f"pinned by {slug}, but made from a changed tree")
    return found


def _says_dirty(path: Path) -> bool:
    """Does a recording say that its tree was changed? One that cannot be read has its own line in `check_recording`."""
    try:
        provenance = json.loads((path / "record.json").read_text(encoding="utf-8"))["provenance"]
        return bool(provenance["dirty"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
