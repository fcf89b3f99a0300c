"""Executed notebook -> HTML page that stays interactive from a file, without a kernel, a CDN or any network.

nbconvert's own pages load require.js, the widget manager and MathJax from CDNs and show nothing offline, so only its
text filters are used here.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
from collections.abc import Iterable, Mapping
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workbench.core.colours import DARK
from workbench.core.files import replace_file
from workbench.suite.pages import plotly_script, raw, rendered
from workbench.widgets.timeline import STATIC

WIDGET = "application/vnd.jupyter.widget-view+json"
PLOTLY = "application/vnd.plotly.v1+json"

LONG_LINES = 40


def to_html(
    executed_ipynb: Path | str,
    out_html: Path | str,
    assets_dir: Path | str | None = None,
    *,
    back_link: str | None = None,
) -> Path:
    """Write an executed notebook as a page that works offline, sliders and figures included.

    Args:
        executed_ipynb: notebook with outputs and saved widget state.
        out_html: page to write.
        assets_dir: folder for plotly's script, shared by many pages (default: ``assets`` beside the page).
        back_link: address of the report page, relative to `out_html`.

    Returns:
        The page's path.

    Raises:
        ValueError: the file is not a notebook; the message says why.
    """
    import nbformat

    source, target = Path(executed_ipynb), Path(out_html)
    assets = Path(assets_dir) if assets_dir is not None else target.parent / "assets"
    try:
        notebook = nbformat.read(source, as_version=4)
    except (ValueError, TypeError, AttributeError, KeyError, nbformat.ValidationError) as error:
        raise ValueError(f"{source}: expected a Jupyter notebook, got {type(error).__name__}: {error}") from error
    page = _Page(notebook)
    cells = [page.cell(cell) for cell in notebook.cells]
    target.parent.mkdir(parents=True, exist_ok=True)
    plotly = None
    if page.figures:
        script = os.path.relpath(plotly_script(assets).resolve(), target.parent.resolve())
        plotly = quote(Path(script).as_posix())
    text = rendered(
        "page",
        title=page.title(source.stem),
        back_link=back_link,
        style=raw(_static("page.css") + _highlight_css()),
        styles=[raw(css) for css in page.styles.values()],
        plotly=plotly,
        cells=cells,
        state=raw(_script_json(page.state)),
        script=raw(_static("offline.js")),
    )
    replace_file(target, text.encode("utf-8", "replace"))
    return target


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _script_json(value: Any) -> str:
    """Return JSON that cannot end the script element it stands in, whatever names it holds."""
    return json.dumps(value, allow_nan=False, default=str).replace("<", "\\u003c")


def _side_by_side(layout: dict[str, Any]) -> bool:
    """Whether panels stand beside each other: on a phone such a figure scrolls, squeezed its texts would overlap."""
    axes = [v for k, v in layout.items() if k.startswith("xaxis") and isinstance(v, dict)]
    return len({tuple(a["domain"]) for a in axes if a.get("domain")}) > 1


def _highlight_css() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    # The page's own background stays: the style's would draw a box of another shade.
    plain = re.compile(r"^(pre|td\.|span\.|\.highlight \{).*\n?", flags=re.M)
    return f"{plain.sub('', light)}\n@media (prefers-color-scheme: dark) {{\n{plain.sub('', dark)}\n}}\n"


class _Page:
    """Collects what a page needs once: models, their scripts and styles, figures."""

    def __init__(self, notebook: Any) -> None:
        widgets = notebook.metadata.get("widgets", {})
        self.saved: Mapping[str, Any] = widgets.get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
        self.notebook = notebook
        self.models: dict[str, Any] = {}
        self.scripts: dict[str, str] = {}
        self.styles: dict[str, str] = {}
        self.figures: list[Any] = []
        self.state = {"models": self.models, "scripts": self.scripts, "figures": self.figures, "dark": DARK}
        cells = (c for c in notebook.cells if c.cell_type == "code")
        self.direct = {text for c in cells for o in c.get("outputs", []) if (text := _content(o))}

    def title(self, default: str) -> str:
        for cell in self.notebook.cells:
            if cell.cell_type == "markdown" and (found := re.search(r"^#\s+(.+)$", cell.source, flags=re.M)):
                return re.sub(r"[*`_]", "", found[1]).strip()
        return default

    def cell(self, cell: Any) -> dict[str, Any]:
        if cell.cell_type == "markdown":
            return {"kind": "text", "html": raw(_markdown(cell.source))}
        if cell.cell_type != "code":
            return {"kind": "text", "html": raw(f"<pre>{html.escape(cell.source)}</pre>")}
        tags = cell.metadata.get("tags", [])
        told = {"injected-parameters": "Parameters that were set", "parameters": "Parameters"}
        label = next((words for tag, words in told.items() if tag in tags), "Code")
        shown = _merged(cell.get("outputs", []))
        views = [o["data"][WIDGET].get("model_id") for o in shown if WIDGET in o.get("data", {})]
        if any(view in self.saved for view in views):
            shown = [o for o in shown if not o.get("metadata", {}).get("workbench_stands_in")]
        outputs = [raw(text) for output in shown if (text := self.output(output))]
        source = raw(_code(cell.source)) if cell.source else ""
        return {"kind": "run", "source": source, "label": label, "outputs": outputs}

    def output(self, output: Mapping[str, Any]) -> str:
        kind = output["output_type"]
        if kind == "stream":
            return _text(output["text"], "plain")
        if kind == "error":
            trace = "\n".join(output.get("traceback", [])) or f"{output.get('ename')}: {output.get('evalue')}"
            return _text(trace, "error")
        return self.bundle(output.get("data", {}))

    def bundle(self, data: Mapping[str, Any]) -> str:
        if WIDGET in data and (shown := self.widget(data[WIDGET].get("model_id", ""))):
            return shown
        if PLOTLY in data:
            figure = data[PLOTLY]
            self.figures.append({k: figure[k] for k in ("data", "layout", "frames") if k in figure})
            height = figure.get("layout", {}).get("height") or 450
            at = len(self.figures) - 1
            drawn = f'<div class="figure" data-figure="{at}" style="min-height:{int(height)}px">Figure</div>'
            return f'<div class="side-by-side">{drawn}</div>' if _side_by_side(figure.get("layout", {})) else drawn
        for mime in ("text/html", "image/svg+xml"):
            if mime in data:
                return f'<div class="html">{data[mime]}</div>'
        for mime in ("image/png", "image/jpeg"):
            if mime in data:
                encoded = html.escape("".join(data[mime].split()), quote=True)
                return f'<img class="image" alt="" src="data:{mime};base64,{encoded}">'
        if "text/markdown" in data:
            return _markdown(data["text/markdown"])
        return _text(data["text/plain"], "plain") if "text/plain" in data else ""

    def widget(self, model_id: str, seen: frozenset[str] = frozenset()) -> str:
        """Return a saved widget: ours live, a box's children in order, of others their text or last output."""
        saved = self.saved.get(model_id)
        if saved is None or model_id in seen:
            return ""
        state = saved.get("state", {})
        if saved.get("model_name") == "AnyModel" and "_esm" in state and "_widget_data" not in state:
            return self.live(model_id, saved)
        if "children" in state:
            inner = (self.widget(c.removeprefix("IPY_MODEL_"), seen | {model_id}) for c in state["children"])
            return "".join(inner)
        if "outputs" in state:
            outputs = _merged(state["outputs"])
            # Sliders at rest show what the cells show; without a kernel they cannot show anything else.
            new = [o for o in outputs if _content(o) not in self.direct]
            note = '<p class="note">In JupyterLab the sliders compute the figure and the claims anew.</p>'
            return "".join(map(self.output, new)) + note * (len(new) < len(outputs))
        value = state.get("value")
        if saved.get("model_name") == "HTMLModel":
            return f'<div class="html">{value or ""}</div>'
        if value is None and state.get("_options_labels") and state.get("index") is not None:
            value = state["_options_labels"][state["index"]]
        named = value is not None and state.get("description")
        return f'<span class="setting">{html.escape(f"{named}: {value}")}</span>' if named else ""

    def live(self, model_id: str, saved: Mapping[str, Any]) -> str:
        state = {k: v for k, v in saved["state"].items() if k not in ("_esm", "_css")}
        script = self.once(self.scripts, saved["state"]["_esm"])
        self.once(self.styles, saved["state"].get("_css") or "")
        buffers = [{"path": b["path"], "data": b["data"]} for b in saved.get("buffers", [])]
        self.models[model_id] = {"state": state, "buffers": buffers, "script": script}
        return f'<div data-model="{html.escape(model_id, quote=True)}">Interactive view</div>'

    @staticmethod
    def once(store: dict[str, str], text: str) -> str:
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        store[key] = text
        return key


def _content(output: Mapping[str, Any]) -> str:
    """Return an output's figure or table as text to compare; empty for any other."""
    data = output.get("data", {})
    if PLOTLY in data:
        return json.dumps([data[PLOTLY].get("data"), data[PLOTLY].get("layout")], sort_keys=True, default=str)
    return data.get("text/html", "")


def _merged(outputs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Join neighbouring pieces of one stream, so that a loop of prints is one block."""
    merged: list[Any] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output["output_type"] == last["output_type"] == "stream" and output["name"] == last["name"]:
            merged[-1] = dict(last) | {"text": last["text"] + output["text"]}
        else:
            merged.append(output)
    return merged


TEX = ["approx", "ge", "geq", "le", "leq", "cdot", "times", "to", ","]
SYMBOLS: dict[str, str] = dict(zip(TEX, "≈≥≥≤≤·×→\u2009"))


def _markdown(text: str) -> str:
    """Return markdown as HTML with simple formulas set in plain HTML: MathJax would have to come from a network."""
    from nbconvert.filters import markdown2html

    parts = re.split(r"(<(code|pre)\b.*?</\2>)", str(markdown2html(text)), flags=re.S)
    prose = (re.sub(r"(\$\$?)([^$<>]+)\1", lambda found: _formula(found[2]) or found[0], p) for p in parts[::3])
    return "".join(chain.from_iterable(zip_longest(prose, parts[1::3], fillvalue="")))


def _formula(tex: str) -> str | None:
    """Return a formula of names, indices and common signs as HTML; None where it holds anything else."""
    upright = re.sub(r"\\(?:mathrm|text|operatorname)\{([\w .]*)\}", r"{\1}", tex)
    signs = re.sub(r"\\([a-z]+|,) ?", lambda found: SYMBOLS.get(found[1], found[0]), upright)
    italic = re.sub(r"(?<![\w{])([A-Za-z])(?=[_^]|\b)(?![\w ]*\})", r"<i>\1</i>", signs)
    raised = re.sub(r"([_^])(?:\{([^{}]*)\}|(\w))", _script, italic)
    plain = re.sub(r"\{([^{}]*)\}", r"\1", raised)
    return None if re.search(r"[\\{}_^]", plain) else f'<span class="formula">{plain}</span>'


def _script(found: re.Match[str]) -> str:
    tag = "sub" if found[1] == "_" else "sup"
    return f"<{tag}>{found[2] if found[2] is not None else found[3]}</{tag}>"


def _code(source: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return highlight(source, PythonLexer(), HtmlFormatter())


def _text(text: str, css: str) -> str:
    from nbconvert.filters import ansi2html

    block, lines = f'<pre class="{css}">{ansi2html(text)}</pre>', text.count("\n") + 1
    long = f'<details class="long"><summary>Output, {lines} lines</summary>{block}</details>'
    return long if lines > LONG_LINES else block
