"""Explorer over a finished sweep: any numeric column of its runs against any parameter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result, json_safe
from workbench.core.params import Params, param
from workbench.experiments import load
from workbench.views.sweep import compare, load_sweep, tidy

if TYPE_CHECKING:
    import plotly.graph_objects as go

EXAMPLE_SLUG = "tool_route_explorer"
EXAMPLE_SKEWS = (0.0, 0.3, 0.6, 0.9)
EXAMPLE_AXES = {"x": "capacity_factor", "y": "drop_rate", "colour": "skew"}
CAPACITY_FACTOR = 1.25


@dataclass(frozen=True, kw_only=True)
class SweepExplorerParams(Params):
    """Which sweep, and what is drawn."""

    folder: str = param(
        "", "folder that workbench sweep wrote; empty: a small example, computed here", analysis=True, path=True
    )
    x: str = param("", "column along the axis; empty: the first swept parameter", analysis=True)
    y: str = param("", "numeric column that is drawn; empty: the first", analysis=True)
    colour: str = param("", "column that tells lines apart; empty: the second swept parameter", analysis=True)


@dataclass(frozen=True, kw_only=True)
class SweepResult(Result):
    """A sweep's rows; `origin` is its summary as `workbench.views.sweep.load_sweep` reads it."""

    @property
    def badge(self) -> str:
        """Number of runs, and the badges that they carry."""
        badges = sorted({r.get("badge") or "no result" for r in self.origin["runs"]})
        return f"sweep of {self.origin['slug']}, {len(self.origin['runs'])} runs: {'; '.join(badges)}"

    def with_params(self, **changes: Any) -> Result:
        """Return the result for other axes, or another folder."""
        return self.experiment.run(**self.params.replace(**changes).as_dict())


@dataclass(frozen=True, kw_only=True)
class SweepExperiment(Experiment):
    """An experiment whose rows are those of a sweep's runs."""

    def run(self, source: str = "auto", **params: Any) -> Result:
        """Read the folder, or compute the example; the source is ``recorded`` where any run was not a model's."""
        values: Any = self.params().replace(**params)
        if not values.folder:
            self.choose(source)
        summary = load_sweep(Path(values.folder).expanduser()) if values.folder else example()
        modelled = all(r.get("source") in ("model", None) for r in summary["runs"])
        return SweepResult(
            experiment=self,
            params=values,
            source="model" if modelled else "recorded",
            tables={"table": tidy(summary)},
            origin=summary,
        )


def example() -> dict[str, Any]:
    """Return a sweep like that of ``workbench sweep tool_route_explorer -p skew=...``, computed in this process."""
    experiment = load(EXAMPLE_SLUG)
    runs = []
    for skew in EXAMPLE_SKEWS:
        result = experiment.run("model", skew=skew, tokens=256)
        told = {"source": result.source, "badge": result.badge, "rows": json_safe(result.table.to_dicts())}
        runs.append({"key": f"skew {skew}", "params": {"skew": skew}, "status": "passed"} | told)
    return {"slug": EXAMPLE_SLUG, "names": ["skew"], "runs": runs}


def model(params: SweepExplorerParams) -> Any:
    """Return the example's rows."""
    return tidy(example())


def draw(result: Result) -> go.Figure:
    """Draw the chosen columns."""
    p = result.params
    asked = {"x": p.x, "y": p.y, "colour": p.colour}
    preset = {} if p.folder else EXAMPLE_AXES
    return compare(result.origin, **{name: value or preset.get(name) for name, value in asked.items()})


def checks(result: Result) -> list[Check]:
    """The sweep is whole; the example shows what a capacity bound does under skew."""
    import polars as pl

    runs = result.origin["runs"]
    different = {repr(sorted(r["params"].items())) for r in runs}
    done = [r for r in runs if r["status"] in ("passed", "claim_failed")]
    found = [
        Check("Every point is in the results exactly once", len(different) == len(runs), f"{len(runs)} runs"),
        Check("Every run finished", len(done) == len(runs), f"{len(done)} of {len(runs)}"),
    ]
    if not result.params.folder:
        at = result.table.filter(pl.col("capacity_factor") == CAPACITY_FACTOR)
        rates = at.sort("skew")["drop_rate"].to_list()
        rises = len(rates) == len(EXAMPLE_SKEWS) and rates == sorted(rates) and rates[-1] > rates[0]
        claim = f"Example: at capacity factor {CAPACITY_FACTOR} more routes drop the more uneven the experts are"
        found.append(Check(claim, rises, ", ".join(f"{r:.3f}" for r in rates)))
    return found


EXPERIMENT = SweepExperiment(
    slug="sweep_explorer",
    group="tools",
    title="Sweep explorer",
    claim="One table over many runs answers how a figure changes with its parameters.",
    kind="model",
    anchor="Appendix B.9",
    params=SweepExplorerParams,
    figure=draw,
    checks=checks,
    model=model,
)
