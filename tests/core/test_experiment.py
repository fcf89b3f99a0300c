"""Parameters, checks and sources of an experiment."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from workbench.core.experiment import Check, Experiment, json_safe
from workbench.core.params import Params, param
from workbench.core.record import Recording
from workbench.experiments import load


@dataclass(frozen=True, kw_only=True)
class P(Params):
    """Parameters of the tests."""

    n: int = param(3, "a count", min=1, max=9)
    x: float = param(0.5, "a number", min=0)
    kind: str = param("a", "a choice", choices=("a", "b"))
    sizes: tuple[int, ...] = param((1, 2), "several", min=1)
    span: int = param(5, "only drawn", min=1, analysis=True)
    maybe: int | None = param(None, "may be absent")


def experiment(**options) -> Experiment:
    common = {
        "slug": "s", "group": "tools", "title": "t", "claim": "c", "kind": "model", "anchor": "a", "params": P,
        "figure": lambda r: None, "checks": lambda r: [Check("rows", r.table.height == r.params.n)],
    }  # fmt: skip
    return Experiment(**{**common, **options})


@pytest.mark.parametrize(
    "values, said",
    [
        ({"n": 0}, "'n': expected 1 to 9, got 0"),
        ({"n": "3"}, "'n': expected int, got str"),
        ({"n": True}, "'n': expected int, got bool"),
        ({"n": 2.5}, "'n': expected int"),
        ({"x": float("nan")}, "'x': expected a finite number"),
        ({"x": -1}, "'x': expected 0 to inf"),
        ({"kind": "c"}, "'kind': expected one of 'a', 'b'"),
        ({"sizes": (1, 0)}, r"'sizes\[1\]': expected 1 to inf"),
        ({"sizes": "12"}, "'sizes': expected a list of int"),
    ],
)
def test_a_bad_value_is_named(values, said):
    with pytest.raises(ValueError, match=said):
        P(**values)


def test_values_are_typed_and_survive_json():
    p = P(n=4.0, x=1, sizes=[3, 4], maybe=7)
    assert (p.n, p.x, p.sizes, p.maybe) == (4, 1.0, (3, 4), 7) and isinstance(p.x, float)
    assert P(**json.loads(json.dumps(p.as_dict()))) == p
    with pytest.raises(ValueError, match="did you mean 'sizes'"):
        p.replace(size=1)


def test_numpy_false_is_a_failure():
    assert Check("c", np.bool_(False)).fails and Check("c", np.bool_(False)).as_dict()["holds"] is False
    assert not Check("c", False, known="why").fails
    assert not Check("c", None).fails and Check("c", None).holds is None


def test_auto_prefers_live_then_recorded_then_model(monkeypatch):
    full = experiment(model=lambda p: [], measure=lambda p, r: [], recording="x", report=lambda p: [])
    monkeypatch.setattr("workbench.core.experiment.gpu_present", lambda: True)
    assert full.choose("auto") == "live"
    monkeypatch.setattr("workbench.core.experiment.gpu_present", lambda: False)
    assert full.choose("auto") == "recorded"
    assert experiment(model=lambda p: [], report=lambda p: []).choose("auto") == "model"
    with pytest.raises(ValueError, match="no CUDA GPU"):
        full.choose("live")
    with pytest.raises(ValueError, match="has no source 'model'"):
        experiment(report=lambda p: []).choose("model")
    with pytest.raises(ValueError, match="unknown source"):
        full.choose("guess")
    assert experiment(measure=lambda p, r: [], live_on_cpu=True).choose("auto") == "live"


def test_a_recorded_result_keeps_what_it_was_measured_with(monkeypatch):
    e = experiment(recording="r", recorded=lambda p, r: [{"i": i} for i in range(p.n)])
    record = {"workload": {"params": {"n": 7, "x": 0.5, "kind": "a", "sizes": [1, 2], "span": 5}}}
    monkeypatch.setattr("workbench.core.record.load_recording", lambda slug, name: Recording(slug, name, record))
    result = e.run("recorded")
    assert result.params.n == 7 and result.table.height == 7 and result.checks[0].holds
    assert e.run("recorded", span=9).params.span == 9, "analysis may differ"
    with pytest.raises(ValueError, match="recorded with n=7, asked for 8"):
        e.run("recorded", n=8)
    assert result.with_params(span=11).params.span == 11


def test_a_result_is_shown_in_one_line_that_says_what_to_do_with_it():
    result = experiment(model=lambda p: [{"i": i} for i in range(p.n)]).run("model", n=3)
    assert repr(result) == "<Result s, model: table 3 rows; .figure(), .report(), .tables>"


def test_a_model_result_is_run_anew_for_other_parameters():
    e = experiment(model=lambda p: [{"i": i} for i in range(p.n)])
    result = e.run("model", n=2)
    assert result.with_params(n=5).table.height == 5
    assert result.badge == "computed by a model"


@pytest.mark.parametrize(
    "used, on_host, told",
    [
        (2, ["NVIDIA H200"] * 2, "2 x NVIDIA H200"),
        (1, ["NVIDIA H200"] * 8, "NVIDIA H200"),
        (None, ["NVIDIA H200"], "NVIDIA H200"),
        (3, ["A", "B", "A", "C"], "2 x A + B"),
        (0, ["NVIDIA H200"], "CPU"),
        (None, [], "CPU"),
    ],
)
def test_the_badge_counts_the_gpus_that_were_used(monkeypatch, used, on_host, told):
    environment = {"gpu": on_host[0] if on_host else None, "gpus": [{"name": n} for n in on_host]}
    record = {"environment": environment, "topology": {"gpus": used},
              "provenance": {"date": "2026-11-29T01:02:03", "commit": "0123456789"}}  # fmt: skip
    monkeypatch.setattr("workbench.core.record.load_recording", lambda slug, name: Recording(slug, name, record))
    result = experiment(recording="r", recorded=lambda p, r: []).run("recorded")
    assert result.badge == f"recorded on {told}, 2026-11-29, commit 0123456"


def test_json_has_no_nan():
    assert json_safe({"a": float("inf"), "b": (np.float64(1.5), np.int32(2)), "c": [np.bool_(True)]}) == {
        "a": None,
        "b": [1.5, 2],
        "c": [True],
    }


def test_unknown_slugs_name_close_ones():
    with pytest.raises(KeyError, match="fig30_submission_headroom"):
        load("fig30_submission_headrom")


def test_tables_in_notebooks_show_texts_without_quotes() -> None:
    import polars as pl

    from workbench import _table_html

    shown = _table_html(pl.DataFrame({"path": ["rowwise", 'a "b" <i>', None], "waits": [0, None, 7]}))
    assert (
        "<td>rowwise</td>" in shown and "&quot;rowwise" not in shown and "null" not in shown and "<td>–</td>" in shown
    )
    assert "<i>" not in shown and "&lt;i&gt;" in shown and "&quot;b&quot;" in shown


def test_rows_of_several_kinds_are_named_tables():
    e = experiment(model=lambda p: {"step": [{"i": i} for i in range(p.n)], "block": [{"j": 0.5}]})
    result = e.run("model", n=2)
    assert {name: t.columns for name, t in result.tables.items()} == {"step": ["i"], "block": ["j"]}
    assert result.table is result.tables["step"]
    told = result.as_dict()
    assert told["table"] == told["tables"]["step"] == [{"i": 0}, {"i": 1}] and told["tables"]["block"] == [{"j": 0.5}]


@dataclass(frozen=True, kw_only=True)
class OwnP(P):
    path: str = param("", "a file of one's own", path=True, analysis=True)


def test_what_a_result_was_made_from_is_opened_once():
    opened = []
    e = experiment(
        params=OwnP,
        opens=lambda p, recording: opened.append(p.n) or len(opened),
        own="path",
        recorded=lambda p, origin: [{"origin": origin, "n": p.n}],
    )
    result = e.run("auto", path="mine/steps.json", n=2)
    assert result.with_params(n=3).table.to_dicts() == [{"origin": 1, "n": 3}] and opened == [2]
    assert result.badge == "your path: steps.json" and result.as_dict()["recording"] == "steps.json"
    other = result.with_params(path="other.json")
    assert other.table.to_dicts() == [{"origin": 2, "n": 2}] and other.badge == "your path: other.json"


def test_live_rows_that_a_measurement_returns_are_the_table(monkeypatch):
    """Only what lies in files is written and opened; rows need no way through a file."""
    monkeypatch.setattr("workbench.core.record.Recorder.write", lambda *_: pytest.fail("written"))
    e = experiment(
        params=OwnP,
        opens=lambda p, recording: pytest.fail("opened"),
        own="path",
        recorded=lambda p, origin: [],
        measure=lambda p, recorder: [{"n": p.n}],
        live_on_cpu=True,
    )
    result = e.run("live", n=1)
    assert result.table.to_dicts() == [{"n": 1}] and result.origin is None


def test_giving_up_ones_own_file_does_not_measure(monkeypatch):
    monkeypatch.setattr("workbench.core.experiment.gpu_present", lambda: True)
    e = experiment(
        params=OwnP,
        opens=lambda p, recording: p.path,
        own="path",
        recorded=lambda p, origin: [{"origin": origin}],
        measure=lambda p, recorder: pytest.fail("measured"),
    )
    with pytest.raises(ValueError, match="has no source 'recorded'"):
        e.run(path="mine.json").with_params(path="")
