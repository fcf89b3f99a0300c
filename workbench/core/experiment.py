"""The one idea: an experiment is plain functions around named tidy tables.

    source -> tidy tables -> figure + checks          (source: model | recorded | live | report)

Nothing here imports polars, plotly or torch at module level, so that a bare GPU machine can import an experiment
and measure it.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.core.colours import SOURCE_COLOURS, pill
from workbench.core.params import Params, check_names
from workbench.core.tables import tables_of

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

    from workbench.core.record import Recording

Source = Literal["model", "recorded", "live", "report"]
SOURCES: tuple[Source, ...] = ("model", "recorded", "live", "report")
RESULT_MIME = "application/vnd.headroom.result+json"
KEPT_ROWS = 500
"""Rows up to which a notebook's report carries its table, for sweeps to gather."""


@dataclass(frozen=True)
class Check:
    """One claim of the report against a table: it holds, fails, or does not apply (`holds=None`).

    Attributes:
        claim: the claim in one sentence.
        holds: True, False, or None where the table cannot decide it.
        value: the figure that decided it, as text or number.
        known: why a claim of the report is known not to hold on this table (another chip, another size). It is shown
            as a disagreement and does not turn the suite red; empty otherwise.
    """

    claim: str
    holds: bool | None
    value: str | float | int | None = None
    known: str = ""

    def __post_init__(self) -> None:
        # NumPy's False is not False: an identity test would let a failed claim pass.
        if self.holds is not None:
            object.__setattr__(self, "holds", bool(self.holds))

    @property
    def fails(self) -> bool:
        """True where the claim does not hold and nobody knows why."""
        return self.holds is False and not self.known

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain = {"claim": self.claim, "holds": self.holds, "value": self.value}
        return plain | ({"known": self.known} if self.known else {})


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table of the report, or one measurement of our kernels.

    Attributes:
        slug: name of module, notebook, test and recordings.
        group: notebook folder: ``s08_sync_free``, ``appendix_b`` or ``tools``.
        title: one line.
        claim: what it shows, one sentence.
        kind: ``conceptual`` (the report's drawing, re-run by its rule), ``model``, ``measured`` or ``report``.
        anchor: where in the report.
        params: a `Params` subclass.
        figure: `Result` -> plotly figure. It never asks where the rows came from.
        checks: `Result` -> claims.
        model: params -> rows, the pure computation. Rows here and below are a list of dicts or a polars DataFrame, or
            where they are of several kinds a mapping of table name to such rows, the main table first.
        report: params -> rows transcribed from the report.
        opens: (params, recording) -> the object that the tables are made from, where that is more than the recording
            (an analysed trace, a reader's archive). It is made once a result and kept in `Result.origin`. The
            recording is None where `own` is given.
        own: name of the path parameter that brings a file or folder of the reader's own; it is opened whatever the
            source, and the badge names it.
        recorded: (params, origin, or without `opens` the recording) -> rows; the default returns the recording's
            tables. Without `opens` they are the same for all `analysis` parameters, so that they are read once.
        measure: (params, recorder) -> rows, run on this machine's GPU; the same function writes recordings.
            None: what the recorder holds; with `opens` that is written to files and opened.
        tests: test files that guard what `measure` measures; a recording is refused while they are red.
        recording: name of the pinned recording under ``data/recorded/<slug>/``.
        interactive: params -> spec of a client-side view (see `workbench.widgets.timeline_view`).
        needs: what live measuring needs, in words (``"one CUDA GPU"``).
        live_on_cpu: ``source="live"`` also runs without a GPU; ``auto`` still prefers a recording there.
        default_source: source that its notebook starts with.
    """

    slug: str
    group: Literal["s08_sync_free", "appendix_b", "tools"]
    title: str
    claim: str
    kind: Literal["conceptual", "model", "measured", "report"]
    anchor: str
    params: type[Params]
    figure: Callable[[Result], go.Figure]
    checks: Callable[[Result], Iterable[Check]]
    model: Callable[[Any], Any] | None = None
    report: Callable[[Any], Any] | None = None
    opens: Callable[[Any, Recording | None], Any] | None = None
    own: str = ""
    recorded: Callable[[Any, Any], Any] | None = None
    measure: Callable[[Any, Any], Any] | None = None
    tests: tuple[str, ...] = ()
    recording: str | None = None
    interactive: Callable[[Any], dict[str, Any]] | None = None
    needs: str = "one CUDA GPU"
    live_on_cpu: bool = False
    default_source: str = "auto"

    def sources(self) -> list[Source]:
        """Return the sources that this experiment has, on any machine."""
        have = {"model": self.model, "recorded": self.recording, "live": self.measure, "report": self.report}
        return [s for s in SOURCES if have[s] is not None]

    def choose(self, source: str) -> Source:
        """Resolve ``auto`` (live where a GPU is, else recorded, else model, else report) and refuse what is absent.

        Raises:
            ValueError: the source is unknown, or this experiment does not have it.
        """
        have = self.sources()
        if source == "auto":
            for s in ("live", "recorded", "model", "report"):
                if s in have and (s != "live" or gpu_present()):
                    return s
            if "live" in have and self.live_on_cpu:
                return "live"
            raise ValueError(f"{self.slug}: nothing is recorded yet, and measuring it needs {self.needs}")
        if source not in SOURCES:
            raise ValueError(f"{self.slug}: unknown source {source!r}: expected auto, {', '.join(SOURCES)}")
        if source not in have:
            raise ValueError(f"{self.slug}: has no source {source!r}; it has {', '.join(have)}")
        if source == "live" and not (self.live_on_cpu or gpu_present()):
            raise ValueError(f"{self.slug}: source 'live' needs {self.needs}; no CUDA GPU is visible on this machine")
        return typing.cast(Source, source)

    def run(self, source: str = "auto", **params: Any) -> Result:
        """Compute, load or measure the tables.

        Args:
            source: ``auto``, ``model``, ``recorded``, ``live`` or ``report``.
            **params: fields of `self.params`; unknown names and bad values raise.
        """
        check_names(self.params, params)
        values = self.params(**params)
        if self.own and getattr(values, self.own):
            assert self.opens and self.recorded
            origin = self.opens(values, None)
            return self.result(values, "recorded", self.recorded(values, origin), origin=origin)
        chosen = self.choose(source)
        recording = origin = rows = None
        if chosen == "model":
            rows = self.model(values)  # type: ignore[misc]
        elif chosen == "report":
            rows = self.report(values)  # type: ignore[misc]
        elif chosen == "recorded":
            from workbench.core.record import load_recording

            recording = load_recording(self.slug, self.recording)  # type: ignore[arg-type]
            values = self.as_recorded(values, recording)
        else:
            from workbench.core.record import Recorder

            recorder = Recorder(self.slug, values.as_dict())
            rows = self.measure(values, recorder)  # type: ignore[misc]
            recording = recorder.live(keep=rows is None and self.opens is not None)
        if rows is None and recording is not None:
            origin = self.opens(values, recording) if self.opens else None
            made = self.recorded if origin is not None or chosen == "recorded" else None
            rows = made(values, origin or recording) if made else recording.tables()
        return self.result(values, chosen, rows, recording, origin)

    def run_with(self, names: Mapping[str, Any]) -> Result:
        """Run with the source and the parameters of these names: in a notebook, ``run_with(globals())``."""
        fields = {f.name for f in dataclasses.fields(self.params)}
        return self.run(names.get("source", "auto"), **{k: v for k, v in names.items() if k in fields})

    def result(self, params: Any, source: Source, rows: Any, recording: Any = None, origin: Any = None) -> Result:
        """Return the result of rows that are there already, see `model` for their forms."""
        return Result(
            experiment=self, params=params, source=source, tables=tables_of(rows), recording=recording, origin=origin
        )

    def as_recorded(self, values: Params, recording: Recording) -> Params:
        """Return `values` with what was measured as the recording says; refuse a request for something else."""
        kept = recording.record.get("workload", {}).get("params", {})
        changes = {}
        for f in dataclasses.fields(self.params):
            if f.name not in kept or f.metadata.get("analysis"):
                continue
            recorded = tuple(kept[f.name]) if isinstance(kept[f.name], list) else kept[f.name]
            asked = getattr(values, f.name)
            if asked not in (recorded, f.default):
                raise ValueError(
                    f"{self.slug}: recorded with {f.name}={recorded!r}, asked for {asked!r}; "
                    "source 'live' measures it, or leave it at its default"
                )
            changes[f.name] = recorded
        return values.replace(**changes)

    def __repr__(self) -> str:
        return f"<Experiment {self.slug}: {self.title} [{', '.join(self.sources())}]>"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Named tables with the story of where they came from.

    Attributes:
        experiment: the experiment.
        params: its parameters.
        source: ``model``, ``recorded``, ``live`` or ``report``.
        tables: tidy polars DataFrames by name, the main one first; one kind of rows in each.
        recording: the recording behind the tables, for ``recorded`` and ``live``.
        origin: what the tables were made from, see `Experiment.opens`.
    """

    experiment: Experiment
    params: Any
    source: Source
    tables: dict[str, pl.DataFrame]
    recording: Recording | None = None
    origin: Any = field(default=None, repr=False)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(table)} rows" for name, table in self.tables.items())
        return f"<Result {self.slug}, {self.source}: {sizes}; .figure(), .report(), .tables>"

    @property
    def table(self) -> pl.DataFrame:
        """The main table: the first one."""
        return next(iter(self.tables.values()))

    @property
    def slug(self) -> str:
        """Slug of the experiment."""
        return self.experiment.slug

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Rows of one table; none where the result has no such table."""
        return self.tables[table].to_dicts() if table in self.tables else []

    def with_params(self, **changes: Any) -> Result:
        """Return the result for other parameters: a model is run anew, a measured table is kept and analysed anew.

        What the tables were made from is kept: nothing is read or measured twice.
        """
        params = self.params.replace(**changes)
        another = self.own != (self.experiment.own and getattr(params, self.experiment.own))
        if another or self.source in ("model", "report"):
            return self.experiment.run(source=self.source, **params.as_dict())
        if self.origin is not None and self.experiment.recorded:
            tables = tables_of(self.experiment.recorded(params, self.origin))
            return dataclasses.replace(self, params=params, tables=tables)
        return dataclasses.replace(self, params=params)

    @property
    def own(self) -> str:
        """Path of the reader's own file or folder behind the tables; empty where they are ours."""
        return self.experiment.own and getattr(self.params, self.experiment.own)

    @property
    def badge(self) -> str:
        """One line that says where the numbers come from."""
        if self.own:
            return f"your {self.experiment.own}: {Path(self.own).name or self.own}{getattr(self.origin, 'note', '')}"
        if self.source == "model":
            return "conceptual model, not measured" if self.experiment.kind == "conceptual" else "computed by a model"
        if self.source == "report":
            return "transcribed from the report"
        assert self.recording is not None
        return self.recording.badge(self.source)

    @cached_property
    def checks(self) -> list[Check]:
        """Claims of the report against this table."""
        return list(self.experiment.checks(self))

    def figure(self) -> go.Figure:
        """Draw the table, with the source badge."""
        return self.badged(self.experiment.figure(self))

    def badged(self, fig: go.Figure) -> go.Figure:
        """Write where the numbers come from under a figure's title, in the source's colour."""
        # plotly reads markup in its texts, and a badge may hold the name of a reader's file.
        subtitle = {"text": f"■ {html.escape(self.badge)}", "font": {"size": 12, "color": SOURCE_COLOURS[self.source]}}
        meta = {"slug": self.slug, "source": self.source, "badge": self.badge}
        return fig.update_layout(title_subtitle=subtitle, meta=meta)

    def as_dict(self) -> dict[str, Any]:
        """Return slug, source, recording, tables (and the first one as `table`) and checks as plain JSON values."""
        tables = {name: json_safe(table.to_dicts()) for name, table in self.tables.items()}
        return {
            "slug": self.slug,
            "source": self.source,
            "recording": Path(self.own).name or None if self.own else self.recording and self.recording.name,
            "table": next(iter(tables.values())),
            "tables": tables,
            "checks": json_safe([c.as_dict() for c in self.checks]),
        }

    def report(self) -> None:
        """Display the checks in a notebook, with a machine-readable copy that the suite reads."""
        from IPython.display import display

        payload = self.as_dict()
        payload.pop("tables")
        if self.table.height > KEPT_ROWS:
            payload.pop("table")
        payload |= {"badge": self.badge, "params": json_safe(self.params.as_dict()), "rows": self.table.height}
        bundle = {"text/html": self._checks_html(), "text/plain": self._checks_text(), RESULT_MIME: payload}
        display(bundle, raw=True)

    def _checks_text(self) -> str:
        lines = [f"{_verdict(c)[0]:>8}  {c.claim}  [{c.value}]{' ' + c.known if c.known else ''}" for c in self.checks]
        return "\n".join([f"{self.slug}: {self.badge}", *lines])

    def _checks_html(self) -> str:
        left = 'style="text-align:left"'
        rows = []
        for c in self.checks:
            word, standing = _verdict(c)
            value = "" if c.value is None else html.escape(str(c.value))
            known = f"<br><small>{html.escape(c.known)}</small>" if c.known else ""
            rows.append(
                f'<tr><td {left}><b style="{pill(standing)}">{word}</b></td>'
                f"<td {left}>{html.escape(c.claim)}{known}</td><td {left}>{value}</td></tr>"
            )
        head = f"<tr><th></th><th {left}>claim</th><th {left}>value</th></tr>"
        table = f'<table class="claims">{head}{"".join(rows)}</table>'
        return f"{table}<p><small>{html.escape(self.badge)}</small></p>"


def _verdict(check: Check) -> tuple[str, str]:
    """Word of one check, and its standing: a key of `core.colours.STANDING_COLOURS`."""
    if check.holds is None:
        return "– n/a", "na"
    if check.holds:
        return "✓ holds", "held"
    return ("≠ differs", "differs") if check.known else ("✗ fails", "failed")


def json_safe(value: Any) -> Any:
    """Return `value` with NumPy scalars, tuples and non-finite floats made JSON-representable (NaN becomes null)."""
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value)


def to_json(result: Result, indent: int | None = None) -> str:
    """Return `Result.as_dict` as strict JSON text."""
    return json.dumps(result.as_dict(), indent=indent, allow_nan=False)


def gpu_present() -> bool:
    """True where torch sees a CUDA GPU."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
