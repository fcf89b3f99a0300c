"""One module per figure, table or kernel sheet: parameters, rows, claims, wiring."""

from __future__ import annotations

import importlib
import pkgutil

from workbench.core.experiment import Experiment
from workbench.core.params import close_names


def slugs() -> list[str]:
    """Return the slugs of all experiments, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def load(slug: str) -> Experiment:
    """Return the experiment named `slug`.

    Raises:
        KeyError: no such experiment; the message names close ones.
    """
    known = slugs()
    if slug not in known:
        near = close_names(slug, known)
        raise KeyError(
            f"no experiment {slug!r}" + (f"; close: {', '.join(near)}" if near else f"; known: {', '.join(known)}")
        )
    experiment = importlib.import_module(f"{__name__}.{slug}").EXPERIMENT
    if experiment.slug != slug:
        raise ValueError(f"module {slug!r} defines experiment {experiment.slug!r}: one slug for both")
    return experiment
