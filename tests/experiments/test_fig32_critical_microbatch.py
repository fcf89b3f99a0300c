"""Figure 32: the schematic's claims, and the analysis of measured tables whose crossover is known."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from types import SimpleNamespace

import polars as pl
import pytest
import torch

import workbench
from workbench.core.experiment import Result, gpu_present
from workbench.experiments import fig32_critical_microbatch as fig32
from workbench.experiments import load
from workbench.views.crossover import taken_apart

TOKENS = (256, 512, 1024, 2048, 4096, 8192)


def table(crossing: float = 2048.0, idle_until: float = 2048.0, growth: float = 1.0) -> list[dict]:
    """Layers whose device time is proportional to tokens and meets submission at `crossing`."""
    rows = []
    for layer in ("dense", "routed, rowwise", "routed, synchronized"):
        submit = 1000.0 if layer == "dense" else 2000.0
        for passes in ("forward", "forward + backward"):
            for mode, cost in (("eager", submit), ("replay", submit / 8)):
                if mode == "replay" and layer == "routed, synchronized":
                    continue
                for tokens in TOKENS:
                    device = submit * tokens / crossing
                    spent = cost * growth ** (tokens / TOKENS[-1])
                    row = {"kind": "measured", "layer": layer, "passes": passes, "mode": mode, "tokens": tokens,
                           "submit_us": json.dumps([spent * f for f in (0.99, 1, 1.01)]),
                           "device_us": json.dumps([device * f for f in (0.99, 1, 1.01)]), "launches": 20,
                           "host_held_up": False}  # fmt: skip
                    if mode == "eager":
                        waits = layer == "routed, synchronized"
                        dry = tokens < (4 * idle_until if waits else idle_until)
                        row |= {"activation_bytes": 100_000 * tokens, "waits": waits, "wall_us_p50": max(device, spent),
                                "idle_share": 0.5 if dry else 0.01}  # fmt: skip
                    rows.append(row)
    return rows


def measured(rows: list[dict], **params) -> Result:
    """A live result over rows, without a GPU."""
    from workbench.core.record import Recorder

    recorder = Recorder("fig32_critical_microbatch", {})
    recorder.set("workload", memory_bytes=100_000_000_000)
    values = fig32.CriticalMicrobatchParams(tokens=TOKENS, **params)
    return fig32.EXPERIMENT.result(values, "live", taken_apart(rows), recorder.live())


def failing(result: Result) -> list[str]:
    return [c.claim for c in result.checks if c.holds is False]


def test_schematic_claims_hold_and_the_curves_end_at_their_memory():
    result = load("fig32_critical_microbatch").run("model")
    assert len(result.checks) == 4 and not failing(result)
    ends = result.table.filter(pl.col("kind") == "device").group_by("layer").agg(
        pl.col("microbatch").max(), pl.col("limit").first()
    )  # fmt: skip
    assert (ends["microbatch"] - ends["limit"]).abs().max() < 1e-9


def test_a_schematic_without_room_for_cheaper_submission_fails_its_claim():
    """At an absurdly small host cost every crossover sits at zero: nothing is left to move."""
    assert any("left" in claim for claim in failing(load("fig32_critical_microbatch").run("model", host_cost=0.1)))


def test_the_known_crossover_is_found_with_its_interval():
    found = {(c["layer"], c["passes"], c["mode"]): c for c in fig32.curves(measured(table()))}
    for key, c in found.items():
        expected = 256.0 if key[2] == "replay" else 2048.0
        assert c["critical"] == pytest.approx(expected, rel=1e-6) and c["low"] <= c["critical"] <= c["high"]
        assert c["high"] / c["low"] < 1.05
    assert found["dense", "forward", "eager"]["limit"] == pytest.approx(1e6)
    assert not failing(measured(table()))


def test_the_table_of_crossovers_says_where_idle_begins_and_memory_ends():
    rows = {(r["layer"], r["passes"], r["mode"]): r for r in fig32.crossovers(measured(table()))}
    row = rows["routed, synchronized", "forward", "eager"]
    # Idle begins far above the crossover of the layer that waits, and one percent of 8 ms is left at the largest size.
    assert row["crossover"] == "2,048" and row["idle > 5% below"] == "7,741"
    assert rows["dense", "forward", "eager"]["us idle per call at the largest"] == "40"
    assert rows["dense", "forward", "eager"]["tokens that fill the memory"] == "1,000,000"
    assert rows["dense", "forward", "replay"]["crossover"] == "at most 256"


def test_sliders_scale_the_measured_table():
    plain = fig32.curves(measured(table()))[0]
    faster = fig32.curves(measured(table(), device_speed=2.0))[0]
    cheaper = fig32.curves(measured(table(), host_cost=0.5))[0]
    smaller = fig32.curves(measured(table(), activation_scale=2.0, memory_scale=0.5))[0]
    assert faster["critical"] == pytest.approx(2 * plain["critical"], rel=1e-6)
    assert cheaper["critical"] == pytest.approx(plain["critical"] / 2, rel=1e-6)
    assert smaller["limit"] == pytest.approx(plain["limit"] / 4)


def test_idle_time_is_no_part_of_a_what_if():
    """It was measured at the table's own speeds: held against a scaled crossover it would fail claims that hold."""
    asked = measured(table(), device_speed=4.0)
    about = [c.holds for c in asked.checks if "runs dry" in c.claim or "a host wait in every call" in c.claim]
    assert about == [None] * 6 and not failing(asked)
    assert measured(table()).figure().layout.shapes and not asked.figure().layout.shapes
    row = fig32.crossovers(asked)[0]
    assert row["idle > 5% below"] == row["us idle per call at the largest"] == ""


def test_crossovers_beyond_all_sizes_do_not_say_which_lies_left():
    cheaper = [c for c in measured(table(crossing=1e6)).checks if "moves the crossover left" in c.claim]
    assert cheaper and all(c.holds is None for c in cheaper)


def test_idle_far_from_the_crossover_fails_the_claim():
    bad = failing(measured(table(idle_until=100_000)))
    assert len(bad) == 4 and all("runs dry" in claim for claim in bad)


def test_a_wait_that_costs_no_idle_time_fails_its_claim():
    """The path with a host wait is held to the other claim: idle beyond the crossover that leaves its wait out."""
    bad = failing(measured(table(idle_until=512.0)))
    assert sum("a host wait in every call" in claim for claim in bad) == 2
    assert sum("runs dry" in claim for claim in bad) == 4


def test_idle_time_inside_the_interval_of_the_crossover_decides_nothing():
    rows = [r | {"submit_us": json.dumps([json.loads(r["submit_us"])[1] * f for f in (0.4, 1, 2.5)])} for r in table()]
    for idle, holds in ((2048, None), (8192, True), (256, False)):
        mine = [r | {"idle_share": 0.5 if r["tokens"] < idle else 0.01} if "idle_share" in r else r for r in rows]
        waits = [c for c in measured(mine).checks if "a host wait in every call" in c.claim]
        assert [c.holds for c in waits] == [holds] * 2, waits


def test_a_host_that_was_held_up_fails_the_claim():
    rows = [r | {"host_held_up": r["layer"] == "dense"} for r in table()]
    bad = failing(measured(rows))
    assert len(bad) == 2 and all("waits for no device value" in claim for claim in bad)


def test_a_dense_layer_that_submits_more_than_a_routed_one_fails_the_claim():
    rows = [r | {"submit_us": json.dumps([9e3] * 3)} if r["layer"] == "dense" else r for r in table()]
    bad = [claim for claim in failing(measured(rows)) if "routing adds submission work" in claim]
    assert len(bad) == 4


def test_submission_that_grows_with_the_microbatch_fails_the_claim():
    assert any("shortens device time" in claim for claim in failing(measured(table(growth=8.0))))


def test_replay_that_costs_more_fails_the_claim():
    rows = [r | {"submit_us": json.dumps([9e9] * 3)} if r["mode"] == "replay" else r for r in table()]
    result = measured(rows)
    assert sum("graph replay submits with less" in claim for claim in failing(result)) == 4
    moved = [c for c in result.checks if "(graph replay)" in c.claim]
    assert len(moved) == 4 and all(c.holds is None and "not cheaper" in c.value for c in moved)


def test_cheaper_submission_that_does_not_reach_the_crossover_fails_the_claim():
    """Cheaper at the median size and dearer around the crossover: left is not where it goes."""
    rows = [
        r | {"submit_us": json.dumps([3000.0 if 1024 <= r["tokens"] <= 2048 else 500.0] * 3)}
        if r["mode"] == "replay" and r["layer"] == "dense"
        else r
        for r in table()
    ]
    assert sum("moves the crossover left" in claim for claim in failing(measured(rows))) == 2


@pytest.mark.parametrize("submit, known", [(1.2, True), (0.8, False)])
def test_compiled_layers_are_judged_by_submission_alone(submit, known):
    """Device time falls by half: the crossover moves right whatever submission does; the claim is about submission."""
    eager = [r for r in table() if r["mode"] == "eager"]
    compiled = [
        r | {"mode": "compiled", "submit_us": json.dumps([v * submit for v in json.loads(r["submit_us"])]),
             "device_us": json.dumps([v / 2 for v in json.loads(r["device_us"])])}
        for r in eager if r["layer"] == "dense"
    ]  # fmt: skip
    checks = [c for c in measured(eager + compiled).checks if "torch.compile" in c.claim]
    assert len(checks) == 4 and not [c for c in checks if c.fails]
    assert [bool(c.known) for c in checks] == [known, False] * 2
    assert [c.holds for c in checks] == [not known, None if known else True] * 2


def test_figures_of_both_sources_draw():
    for result in (measured(table()), load("fig32_critical_microbatch").run("model", replay=False)):
        names = {t.name for t in result.figure().data}
        assert ("submission time, eager" in names) or ("CPU submission, eager" in names)
    hidden = {t.name for t in measured(table(), replay=False).figure().data}
    assert "submission time, replay" not in hidden


class Device:
    """A pretended device and host: device time grows with the size, submission does not."""

    def __init__(self, monkeypatch, crossing: int = 2048, waits: bool = False) -> None:
        from workbench.measure import capture, regions, timing

        self.crossing, self.waits, self.size, self.calls = crossing, waits, 0, []
        monkeypatch.setattr(capture, "require_gpu", lambda what: None)
        monkeypatch.setattr(regions, "spin_cycles_per_us", lambda: 1.0)
        monkeypatch.setattr(regions, "measure_region", self.measure)
        monkeypatch.setattr(regions, "back_to_back", lambda call, calls: (0.0 if self.size >= crossing else 0.5, 7))
        monkeypatch.setattr(timing, "wall_us", lambda call, **_: [100.0, 100.0])
        properties = type("Properties", (), {"total_memory": 1 << 37})
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)

    def prepare(self, size: int):
        def call() -> None:
            self.size = size

        return call

    def measure(self, call, *, repeats, warmup, per_us, count):
        from workbench.measure.regions import Region

        call()
        self.calls.append((self.size, repeats, warmup))
        times = [100.0 * self.size / self.crossing] * repeats
        return Region([100.0] * repeats, times, waited=self.waits)


def test_your_own_layer_gets_its_crossover(monkeypatch):
    device = Device(monkeypatch)
    result = workbench.critical_microbatch(device.prepare, [512, 1024, 4096], repeats=9)
    (curve,) = fig32.curves(result)
    assert curve["critical"] == pytest.approx(2048) and curve["layer"] == "your layer"
    assert [r["launches"] for r in curve["rows"]] == [7, 7, 7]
    assert Counter(r["tokens"] for r in result.rows("repeats")) == {512: 9, 1024: 9, 4096: 9}
    # Every size once a round; the long warm-up belongs to the first.
    assert device.calls == [(s, 3, 1 if turn else 3) for turn in range(3) for s in (512, 1024, 4096)]
    assert len(result.checks) == 4 and not failing(result)
    assert result.with_params(device_speed=2.0).figure().data
    assert result.recording.record["workload"]["size_unit"] == "tokens"


class PretendedLayers:
    """Stands in for the development model's layers; one of them refuses to be compiled."""

    def __init__(self, device: Device, broken: BaseException | None) -> None:
        self.device, self.broken, self.wrong = device, broken, False
        self.layers = {"dense": "dense", "routed, rowwise": "rowwise", "routed, synchronized": "synchronized"}

    def region(self, name, passes, tokens, layer=None):
        from workbench.measure.blocks import LayerRegion

        if layer == "compiled rowwise" and isinstance(self.broken, ArithmeticError):
            self.wrong = True
        elif layer == "compiled rowwise" and self.broken:
            raise self.broken
        call = self.device.prepare(tokens)
        # As the real one: every region draws its own input.
        x = torch.randn(4)
        wrong = 1.0 if layer == "compiled rowwise" and self.wrong else 0.0
        return LayerRegion(lambda: (call(), x + wrong)[1], call, call)


@pytest.mark.parametrize(
    "broken, said",
    [
        (None, "graphs over all sizes"),
        (TypeError("no\nsecond line"), "refused: TypeError: no"),
        (KeyboardInterrupt(), None),
        (ArithmeticError(), "compiled output differs"),
    ],
)
def test_measuring_visits_every_region_and_keeps_its_rows_whatever_the_compiler_does(monkeypatch, broken, said):
    from workbench.core.record import Recorder
    from workbench.measure import blocks, processes, timing

    device = Device(monkeypatch)
    monkeypatch.setattr(blocks, "Layers", lambda experts, gemm, router_mode: PretendedLayers(device, broken))
    monkeypatch.setattr(blocks, "activation_bytes", lambda region: 1000)
    monkeypatch.setattr(timing, "captured_graph", lambda calls, warmup: SimpleNamespace(replay=calls[0]))
    monkeypatch.setattr("torch.compile", lambda layer, dynamic: f"compiled {layer}")
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(processes, "in_new_process", lambda function, *args: function(*args))
    params = fig32.CriticalMicrobatchParams(tokens=(1024, 32768), compiled_tokens=(1024,), repeats=12)
    recorder = Recorder("fig32_critical_microbatch", {})
    fig32.measure(params, recorder)
    modes = {}
    for r in recorder.rows:
        modes.setdefault(r["mode"], []).append(r)
    assert len(modes["eager"]) == 2 * 3 * 2 and len(modes["replay"]) == 2 * 2 * 2
    assert len(modes["compiled"]) == (2 if broken else 4)
    # Compiled rounds bring as many more of the eager ones beside them.
    repeats = Counter((r["layer"], r["tokens"]) for r in recorder.tables["repeats"]
                      if (r["mode"], r["passes"]) == ("eager", "forward"))  # fmt: skip
    assert repeats == {("dense", 1024): 24, ("dense", 32768): 6, ("routed, rowwise", 32768): 6,
                       ("routed, rowwise", 1024): 12 if broken else 24, ("routed, synchronized", 1024): 12,
                       ("routed, synchronized", 32768): 6}  # fmt: skip
    assert {r["layer"] for r in modes["eager"] if r["waits"]} == {"routed, synchronized"}
    compiled = recorder.live().record["protocol"]["compile"]
    assert "interrupted" in compiled if said is None else said in compiled["routed, rowwise"]
    result = fig32.EXPERIMENT.result(params, "live", recorder.tables, recorder.live())
    assert result.checks and result.figure().data


def test_a_crash_while_compiling_is_a_refusal_and_any_other_end_is_an_error(monkeypatch):
    from workbench.core.record import Recorder
    from workbench.measure import blocks, processes, timing

    device = Device(monkeypatch)
    monkeypatch.setattr(blocks, "Layers", lambda experts, gemm, router_mode: PretendedLayers(device, None))
    monkeypatch.setattr(blocks, "activation_bytes", lambda region: 1000)
    monkeypatch.setattr(timing, "captured_graph", lambda calls, warmup: SimpleNamespace(replay=calls[0]))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)

    def ends(error: Exception) -> Recorder:
        monkeypatch.setattr(processes, "in_new_process", lambda *_: (_ for _ in ()).throw(error))
        recorder = Recorder("fig32_critical_microbatch", {})
        fig32.measure(fig32.CriticalMicrobatchParams(tokens=(1024,), compiled_tokens=(1024,)), recorder)
        return recorder

    recorder = ends(processes.ProcessCrashedError("ended by SIGSEGV"))
    assert set(recorder.groups["protocol"]["compile"].values()) == {"refused: ended by SIGSEGV"}
    assert {r["mode"] for r in recorder.rows} == {"eager", "replay"}
    with pytest.raises(processes.ProcessEndedError, match="out of memory"):
        ends(processes.ProcessEndedError("out of memory"))


def test_several_layers_stand_side_by_side_and_a_wait_is_said(monkeypatch):
    device = Device(monkeypatch, waits=True)
    result = workbench.critical_microbatch({"a": device.prepare, "b": device.prepare}, [1, 2], unit="sequences")
    assert [c["layer"] for c in fig32.curves(result)] == ["a", "b"]
    bad = [c for c in result.checks if c.holds is False and "waits for no device value" in c.claim]
    assert len(bad) == 2 and "1, 2 sequences" in bad[0].value
    assert "sequences per microbatch" in result.figure().to_json()


@pytest.mark.gpu
def test_a_real_product_crosses_between_a_tiny_and_a_large_size():
    place = {"device": "cuda", "dtype": torch.bfloat16}
    weight = torch.randn(4096, 4096, **place)
    result = workbench.critical_microbatch(
        lambda n: functools.partial(torch.mm, torch.randn(n, 4096, **place), weight), [16, 256, 4096, 32768], repeats=6
    )
    (curve,) = fig32.curves(result)
    assert 16 < curve["critical"] < 32768
    assert [r["launches"] for r in curve["rows"]] == [pytest.approx(1, abs=1)] * 4 and not curve["rows"][0][
        "host_held_up"
    ]


@pytest.mark.parametrize("sizes", [[256], [512, 256], [256, 256], [0, 4], [1.5, 3], [True, 2], 512, None])
def test_sizes_that_cannot_be_swept_are_refused(monkeypatch, sizes):
    with pytest.raises(ValueError, match="ascending, got"):
        workbench.critical_microbatch(Device(monkeypatch).prepare, sizes)


def test_your_layer_needs_a_gpu_enough_repeats_and_a_callable(monkeypatch):
    if not gpu_present():
        with pytest.raises(RuntimeError, match="critical_microbatch needs a CUDA GPU"):
            workbench.critical_microbatch(lambda n: lambda: None, [1, 2])
    device = Device(monkeypatch)
    for repeats in (2, 7.5, "12"):
        with pytest.raises(ValueError, match=f"at least 6, got {repeats!r}"):
            workbench.critical_microbatch(device.prepare, [1, 2], repeats=repeats)
    with pytest.raises(TypeError, match=r"your layer at size 1: .* got int"):
        workbench.critical_microbatch(lambda n: n, [1, 2])
    for prepare, got in ((None, "NoneType for 'your layer'"), ({}, "{}"), ({"a": 5}, "int for 'a'"), ({1: print}, "1")):
        with pytest.raises(TypeError, match=f"prepare: expected a function of the size, .* got .*{got}"):
            workbench.critical_microbatch(prepare, [1, 2])


@pytest.mark.skipif(fig32.EXPERIMENT.recording is None, reason="no recording is pinned yet")
def test_recorded_claims_hold_or_are_known():
    result = load("fig32_critical_microbatch").run("recorded")
    assert len(result.checks) > 15 and [c.claim for c in result.checks if c.fails] == []
    faster = dataclasses.replace(result, params=result.params.replace(host_cost=0.5))
    for a, b in zip(fig32.curves(result), fig32.curves(faster)):
        assert b["critical"] <= a["critical"]
