"""What the pages of runs, sweeps and notebooks share: templates, and plotly's script beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.core.colours import DARK, WORDS
from workbench.core.files import replace_file
from workbench.views.contrast import INKS

FOLDER = "notebooks"
"""Of the executed notebooks of a run, beside its report page."""


def rendered(name: str, filters: Mapping[str, Callable[[Any], str]] | None = None, **values: Any) -> str:
    """Return a page made from ``templates/<name>.html.j2``; every string that is not marked as HTML is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters or {}
    environment.globals |= {"colours": WORDS, "dark": DARK, "inks": INKS}
    return environment.get_template(f"{name}.html.j2").render(**values)


def raw(text: str) -> Any:
    """Mark text as HTML that needs no escaping."""
    import markupsafe

    return markupsafe.Markup(text)


def plotly_script(folder: Path) -> Path:
    """Put plotly's script into `folder`, where it is not there already, and return its path."""
    import plotly

    script, target = Path(plotly.__file__).parent / "package_data" / "plotly.min.js", folder / "plotly.min.js"
    if not target.exists() or target.stat().st_size != script.stat().st_size:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(target, script.read_bytes())
    return target
