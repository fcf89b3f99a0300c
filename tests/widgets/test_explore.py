"""The slider panel: made from the bounds of Params, shows what its values give, an error in place of a stale figure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ipywidgets
import pytest

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.widgets import explore


@dataclass(frozen=True, kw_only=True)
class LineParams(Params):
    slope: float = param(1.0, "rise per step", unit="us", min=0.0, max=3.0, step=0.1)
    points: int = param(5, "number of points", min=2, max=50)
    # Ten to the power of the logarithm of these bounds lies outside of them.
    scale: float = param(15.0, "factor", min=11.0, max=20.0, log=True)
    shape: str = param("line", "form", choices=("line", "square"))
    size: int = param(64, "sizes far apart", choices=(16, 64, 4096), log=True)
    label: str = param("x", "has no bounds, so no control")


def rows(params: LineParams) -> list[dict[str, Any]]:
    if params.points == 13:
        raise ValueError("thirteen points cannot be drawn")
    return [{"x": i, "y": params.slope * i} for i in range(params.points)]


def figure(result: Result) -> Any:
    import plotly.graph_objects as go

    return go.Figure(go.Scatter(x=result.table["x"].to_list(), y=result.table["y"].to_list()))


LINE = Experiment(
    slug="line",
    group="tools",
    title="A line",
    claim="it rises",
    kind="model",
    anchor="none",
    params=LineParams,
    figure=figure,
    checks=lambda result: [Check("it rises", result.params.slope > 0, result.params.slope)],
    model=rows,
)


def shown(explorer: Any) -> list[float]:
    return explorer.output.outputs[0]["data"]["application/vnd.plotly.v1+json"]["data"][0]["y"]


def test_controls_follow_the_metadata() -> None:
    explorer = explore(LINE, slope=2.0).explorer
    slope, scale = explorer.controls["slope"], explorer.controls["scale"]
    assert (slope.value, slope.min, slope.max, slope.step) == (2.0, 0.0, 3.0, 0.1)
    assert "us" in slope.description
    assert isinstance(scale, ipywidgets.FloatLogSlider)
    assert (10**scale.min, 10**scale.max) == pytest.approx((11.0, 20.0))
    assert explorer.controls["shape"].options == ("line", "square")
    size = explorer.controls["size"]
    assert isinstance(size, ipywidgets.SelectionSlider) and (size.options, size.value) == ((16, 64, 4096), 64)
    size.value = 4096
    assert explorer.result.params.size == 4096
    assert "label" not in explorer.controls


def test_a_moved_slider_redraws() -> None:
    explorer = explore(LINE, label="kept").explorer
    assert shown(explorer) == [0, 1, 2, 3, 4]
    explorer.controls["slope"].value = 2.0
    assert shown(explorer) == [0, 2, 4, 6, 8]
    assert "it rises" in explorer.output.outputs[1]["data"]["text/plain"]
    assert explorer.result.params.label == "kept"


def test_an_error_takes_the_place_of_the_figure() -> None:
    explorer = explore(LINE).explorer
    explorer.controls["points"].value = 13
    assert explorer.result is None
    assert explorer.output.outputs[0]["text"] == "thirteen points cannot be drawn\n"
    explorer.controls["points"].value = 3
    assert shown(explorer) == [0, 1, 2]


def test_a_drag_is_computed_once() -> None:
    async def drag() -> int:
        explorer = explore(LINE).explorer
        runs = []
        update = explorer.update
        explorer.update = lambda: (runs.append(1), update())
        for i in range(2, 12):
            explorer.controls["points"].value = i
        await asyncio.sleep(0.4)
        assert len(shown(explorer)) == 11
        return len(runs)

    assert asyncio.run(drag()) == 1


def test_the_report_s_values_come_back() -> None:
    view = explore(LINE, slope=2.0, points=9)
    button = next(w for w in view.children[0].children if isinstance(w, ipywidgets.Button))
    button.click()
    assert shown(view.explorer) == [0, 1, 2, 3, 4]


def test_a_recorded_table_is_kept_and_analysed_anew() -> None:
    table = LINE.run(slope=2.0).table
    kept = Result(experiment=LINE, params=LineParams(), source="live", tables={"table": table}, recording=recording())
    explorer = explore(kept, only=["slope"]).explorer
    assert list(explorer.controls) == ["slope"]
    explorer.controls["slope"].value = 0.0
    assert shown(explorer) == [0, 2, 4, 6, 8], "the measured table must not be computed by the model"
    assert explorer.result.source == "live"
    assert not explorer.result.checks[0].holds


def recording() -> Any:
    return SimpleNamespace(badge=lambda source: f"{source} on a test machine", name="none")


def test_the_ends_of_a_logarithmic_slider_are_inside_its_bounds() -> None:
    explorer = explore(LINE).explorer
    for end in ("min", "max"):
        explorer.controls["scale"].value = 10 ** getattr(explorer.controls["scale"], end)
        assert explorer.result is not None


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown parameters slop: allowed are slope, points"):
        explore(LINE, only=["slop"])
    with pytest.raises(ValueError, match="unknown parameter 'slop'"):
        explore(LINE, slop=1.0)
