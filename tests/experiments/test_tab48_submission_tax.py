"""Table 48's experiment on made-up samples: what a row says, which claims hold, and that they can fail."""

from __future__ import annotations

import polars as pl
import pytest

from workbench.core.experiment import Result
from workbench.experiments import tab48_submission_tax as tab48
from workbench.widgets import explore

CEILINGS = {"copy_GBps": 4000.0, "bf16_TFLOPs": 700.0, "fp8_TFLOPs": 1250.0}
TIMES = {  # M -> variant -> (eager, graph), prequantised and including quantisation alike
    128: {"bf16_grouped": (68.0, 62.0), "ours": (30.0, 22.0), "multi_launch": (90.0, 50.0)},
    4096: {"bf16_grouped": (76.0, 68.0), "ours": (45.0, 40.0), "multi_launch": (95.0, 60.0)},
    32768: {"bf16_grouped": (506.0, 505.0), "ours": (300.0, 290.0), "multi_launch": (420.0, 400.0)},
}


def process(drift: float = 1.0, honest: bool = False, **changed: float) -> dict:
    samples = []
    for M, variants in TIMES.items():
        for variant, (eager, graph) in variants.items():
            for source in tab48.INPUTS:
                if variant == "bf16_grouped" and source == "including_q":
                    continue
                scale = drift if variant == "ours" else 1.0
                named = (f"{variant}_{M}_{source}_eager", f"{variant}_{M}_eager")
                eager_us = next((changed[n] for n in named if n in changed), eager) * scale
                sample = {"M": M, "variant": variant, "input": source, "swept": False, "error": 1.7e-3 * scale}
                sample |= {
                    "eager": [[eager_us - 1, eager_us], [eager_us, eager_us + 1]],
                    "graph": [[graph * scale] * 5],
                }
                if honest:
                    sample |= {
                        "submit_us": [10.0, 12.0, 50.0],
                        "back_to_back_us": [31.0],
                        "rotating_us": [25.0],
                        "launches": 2,
                    }
                samples.append(sample)
    return {"samples": samples, "failures": []}


def result(*processes: dict) -> Result:
    params = tab48.SubmissionTaxParams()
    rows = tab48.gather(processes, params, CEILINGS)
    frame = pl.DataFrame(rows, infer_schema_length=None)
    return Result(experiment=tab48.EXPERIMENT, params=params, source="model", tables={"table": frame})


def cell(found: Result, **where) -> dict:
    rows = found.table.filter(**where).to_dicts()
    assert len(rows) == 1
    return rows[0]


def test_speedup_is_taken_inside_each_process_and_its_range_is_kept():
    found = result(process(1.0, honest=True), process(1.1), process(0.9))
    row = cell(found, M=128, input="including_q", variant="ours", mode="eager")
    assert row["bf16_time_us_p50"] == 68.0 and row["time_us_p50"] == 30.0
    assert row["speedup"] == pytest.approx(68 / 30, abs=1e-4)
    assert row["speedup_min"] == pytest.approx(68 / 33, abs=1e-4)
    assert row["speedup_max"] == pytest.approx(68 / 27, abs=1e-4)
    assert (row["restarts"], row["submit_us_p50"], row["launches"]) == (3, 12.0, 2)
    assert row["error"] == pytest.approx(1.7e-3 * 1.1), "the worst process counts"
    assert cell(found, M=128, input="including_q", variant="bf16_grouped", mode="graph")["speedup"] == 1


def test_a_variant_that_failed_in_one_process_is_compared_inside_the_others():
    first, second, third = process(1.0), process(1.1, bf16_grouped_128_eager=88.0), process(0.9)
    first["samples"] = [s for s in first["samples"] if (s["variant"], s["M"]) != ("ours", 128)]
    row = cell(result(first, second, third), M=128, input="prequantized", variant="ours", mode="eager")
    assert (row["speedup_min"], row["speedup_max"], row["restarts"]) == pytest.approx((68 / 27, 88 / 33, 2), abs=1e-4)
    third["samples"] = [s for s in third["samples"] if (s["variant"], s["M"]) != ("bf16_grouped", 128)]
    row = cell(result(first, second, third), M=128, input="prequantized", variant="ours", mode="eager")
    assert (row["speedup"], row["restarts"]) == pytest.approx((88 / 33, 1), abs=1e-4)


def test_columns_begin_as_the_table_is_asked_for():
    assert result(process()).table.columns[:8] == [
        "M", "input", "variant", "mode", "speedup", "time_us_p50", "bf16_time_us_p50", "floor_share",
    ]  # fmt: skip


def test_floor_counts_each_operand_once():
    params = tab48.SubmissionTaxParams()
    weights, rows = 16 * 1536 * 3072, 128
    folded = tab48.product_cost(rows, params, "ours", "prequantized")
    assert folded.bytes == rows * 1536 + weights + rows + 16 * 3072 + 2 * rows * 3072
    assert tab48.product_cost(rows, params, "ours", "including_q").bytes - folded.bytes == rows * 1536
    assert tab48.product_cost(rows, params, "ours_canonical", "prequantized").bytes - folded.bytes == rows * (48 - 1)
    assert tab48.product_cost(rows, params, "multi_launch", "prequantized") == tab48.product_cost(
        rows, params, "ours_canonical", "prequantized"
    )
    assert folded.flop == 2 * rows * 1536 * 3072
    row = cell(result(process()), M=128, input="prequantized", variant="ours", mode="graph")
    assert row["floor_share"] == pytest.approx(folded.bytes / 4000e3 / 22, abs=1e-4)


def test_claims_hold_on_these_samples_and_the_comparison_has_twelve_cells():
    found = result(process())
    assert [c.holds for c in found.checks] == [True] * 4
    cells = tab48.comparison(found)
    assert len(cells) == 12 and all(c["ahead"] for c in cells)
    assert {c[tab48.REPORT] for c in cells} == {0.66, 2.17, 0.34, 2.03, 0.65, 1.26, 0.32, 1.06, 1.43, 1.42, 1.21, 1.22}
    assert found.figure().data


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({"ours_32768_eager": 400.0}, [0, 3]),
        ({"ours_32768_prequantized_eager": 260.0}, [0]),
        ({"ours_32768_including_q_eager": 260.0}, [0]),
        ({"ours_32768_including_q_eager": 325.0}, [0]),
        ({"ours_128_eager": 22.0, "ours_4096_eager": 44.0}, []),
        ({"multi_launch_128_eager": 40.0}, [1, 2]),
        ({"ours_4096_eager": 300.0}, [3]),
    ],
)
def test_claims_can_fail(changed, failing):
    assert [i for i, c in enumerate(result(process(**changed)).checks) if c.holds is False] == failing


def test_convergence_is_read_at_the_reports_largest_size_and_shows_both_inputs():
    found = result(process(ours_32768_prequantized_eager=280.0, ours_32768_including_q_eager=310.0))
    beyond = {"variant": "ours", "M": 65536, "mode": "eager", "speedup": 9.0}
    rows = found.table.to_dicts() + [beyond | {"input": s} for s in tab48.INPUTS]
    rows += [beyond | {"input": s, "mode": "graph", "speedup": 1.0} for s in tab48.INPUTS]
    swept = Result(
        experiment=tab48.EXPERIMENT,
        params=found.params,
        source="model",
        tables={"table": pl.DataFrame(rows, infer_schema_length=None)},
    )
    for checked in (found, swept):
        check = checked.checks[0]
        assert "M = 32768" in check.claim and "less than 10% apart for either input" in check.claim
        # Speedups are 506/280 and 505/290, 506/310 and 505/290.
        assert check.holds and check.value == "prequantized 3.8%, including q 6.7% apart"


def test_the_least_lead_is_the_smallest_of_the_cells():
    cells = tab48.comparison(result(process()))
    least = min(c["ours"] / c[tab48.REPORT] for c in cells)
    assert result(process()).checks[3].value == f"12 cells, least lead {least:.2f}x"


@pytest.mark.parametrize("missing", [("graph", 32768), ("eager", 32768), ("graph", 128)])
def test_a_table_without_one_cell_leaves_its_claim_open(missing):
    mode, M = missing
    part = process()
    for sample in part["samples"]:
        if sample["M"] == M and sample["variant"] != "bf16_grouped" and sample["input"] == "including_q":
            sample[mode] = []
    want = [None if M == 32768 else True, True, None if M == 128 else True, None]
    assert [c.holds for c in result(part).checks] == want


def test_the_slider_steps_through_the_recorded_sizes_and_reads_them_off():
    recorded = tab48.EXPERIMENT.run(source="recorded")
    slider = explore(recorded, only=["view_M"]).explorer.controls["view_M"]
    assert list(slider.options) == sorted(set(recorded.table["M"])) == sorted(tab48.ROWS_M + tab48.SWEPT_M)
    for M in (16, 4096, 65536):
        found = recorded.with_params(view_M=M)
        for heading, source in zip(found.figure().layout.annotations, tab48.INPUTS):
            for mode in tab48.MODES:
                row = cell(found, M=M, input=source, variant="ours", mode=mode)
                shown = f"ours at M = {M}, {mode}: {row['time_us_p50']:.1f} us, {row['speedup']:.2f}x BF16"
                assert shown in heading.text


@pytest.mark.parametrize(("view_M", "shown"), [(64, 128), (512, 128), (2048, 4096), (65536, 32768)])
def test_a_size_that_was_not_measured_shows_the_nearest_on_the_logarithmic_axis(view_M, shown):
    found = result(process())
    found = Result(
        experiment=tab48.EXPERIMENT,
        params=found.params.replace(view_M=view_M),
        source="model",
        tables={"table": found.table},
    )
    assert f"ours at M = {shown}, " in found.figure().layout.annotations[0].text


def test_the_legend_stands_below_the_panels():
    fig = tab48.EXPERIMENT.run(source="recorded").figure()
    assert fig.layout.legend.yanchor == "top" and fig.layout.legend.y < 0
    assert fig.layout.margin.t < 140, "title, badge and three lines of headings"


def test_claims_that_the_table_cannot_decide_are_left_open():
    only = process()
    only["samples"] = [s for s in only["samples"] if s["M"] == 4096]
    assert [c.holds for c in result(only).checks] == [None, None, None, None]


def test_the_reports_own_cells_show_its_claims():
    assert [c.holds for c in tab48.EXPERIMENT.run(source="report").checks] == [True, True, True]


def test_launch_costs_need_the_honest_columns():
    assert tab48.launch_costs(result(process())) == []
    costs = tab48.launch_costs(result(process(honest=True)))
    assert len(costs) == 18 and {c["submit_us_per_launch"] for c in costs} == {6.0}


def test_a_variant_that_raises_is_named_and_the_others_are_timed(monkeypatch):
    import torch

    from workbench.measure import table48, timing

    def calls(M, **_):
        def broken():
            raise RuntimeError("no such kernel")

        def right():
            return torch.ones(M, 2)

        return {(table48.BASELINE, "prequantized"): [right], ("ours", "prequantized"): [broken, broken]}

    def error_of(call, want):
        return float((call() - want).norm())

    monkeypatch.setattr(table48, "calls", calls)
    monkeypatch.setattr(table48, "expected", lambda M, **_: dict.fromkeys(("bf16", "mxfp8"), torch.ones(M, 2)))
    monkeypatch.setattr(table48, "error_of", error_of)
    monkeypatch.setattr(table48, "eager_us", lambda call: [1.0])
    monkeypatch.setattr(table48, "graph_us", lambda calls: [1.0])
    monkeypatch.setattr(table48, "ceilings", dict)
    for name in ("submit_us", "wall_us", "launches"):
        monkeypatch.setattr(timing, name, lambda *args, **options: [1.0])
    request = dict.fromkeys(("experts", "k", "n", "seed"), 2) | {"rows_M": (64,), "swept_M": (128,), "reverse": 0}
    got = table48.measure_process(request | {"honest": True})
    assert [(s["M"], s["variant"]) for s in got["samples"]] == [(64, table48.BASELINE), (128, table48.BASELINE)]
    assert [f for f in got["failures"] if "no such kernel" in f] == got["failures"] and len(got["failures"]) == 2


@pytest.mark.gpu
def test_a_wrong_variant_is_named_and_not_timed(monkeypatch):
    import torch

    from workbench.measure import table48

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the CUDA kernels need compute capability 9")
    real = table48.calls

    def broken(*args, **options):
        found = real(*args, **options)
        found["ours_fast", "including_q"] = [lambda: found["ours", "including_q"][0]().mul_(1.01)]
        return found

    monkeypatch.setattr(table48, "calls", broken)
    request = {
        "experts": 4,
        "k": 256,
        "n": 256,
        "seed": 0,
        "rows_M": (64,),
        "swept_M": (),
        "honest": True,
        "reverse": 0,
    }
    got = table48.measure_process(request)
    assert len(got["failures"]) == 1 and "ours_fast" in got["failures"][0] and "wrong" in got["failures"][0]
    timed = {(s["variant"], s["input"]): s["error"] for s in got["samples"]}
    assert ("ours_fast", "including_q") not in timed and ("ours", "including_q") in timed
    assert all(0 < error < table48.WRONG for error in timed.values())
