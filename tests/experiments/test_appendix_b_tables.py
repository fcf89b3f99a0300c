"""The experiments on Appendix B's tables: what they claim, may not claim, and whose numbers their figures show."""

from __future__ import annotations

import json

import polars as pl
import pytest
from changing import changed

from workbench.core.experiment import Result
from workbench.core.record import data_root
from workbench.experiments import load

SLUGS = ("tab47_workload_roles", "tab50_throughput_runs", "b3_fsdp_endpoints", "tab51_metric_definitions")


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {slug: load(slug).run("model") for slug in SLUGS}


@pytest.mark.parametrize("slug", SLUGS)
def test_claims_hold_or_are_known(results, slug):
    checks = results[slug].checks
    assert len(checks) > 5 and [c.claim for c in checks if c.fails] == []


def test_the_alternates_are_shown_as_a_disagreement(results):
    known = [c for c in results["tab50_throughput_runs"].checks if c.holds is False]
    assert [c.value for c in known] == ["Small-64E, 16 Mi: 821; Large-128E, PP8: 757"] and known[0].known


def test_printed_values_beside_ours(results):
    """The ten derived values of Section B.4, to half a unit of the last digit."""
    rows = results["tab47_workload_roles"].tables["derived"]
    assert rows["printed"].to_list() == ["10.89", "9.18", "16", "1.125", "49.40", "2.02", "4", "0.1875", "4", "1"]
    assert rows["agrees"].all() and rows["value"][0] == pytest.approx(10.8888, abs=5e-5)


def test_a_value_that_disagrees_fails_its_claim(results):
    good = results["tab47_workload_roles"]
    wrong = changed(good, "derived", pl.lit(False).alias("agrees"))
    assert sum(c.fails for c in wrong.checks) == 10


def test_unprinted_quantities_are_ranges_not_values(results):
    rows = results["tab47_workload_roles"].tables["range"]
    assert "value" not in rows.columns and (rows["low"] < rows["high"]).all()
    widths = results["tab47_workload_roles"].tables["dense_width"]
    assert widths["high"].max() > 40_000 and widths["low"].min() < 1_000


@pytest.mark.parametrize(
    "change, quantity, expected",
    [
        ({"top_k": 4}, "experts_per_active", 32),
        ({"routed_experts": 32, "blocks": 8, "global_batch_Mi": 0.75}, "inactive_params", 1_019_215_872),
        ({"submit_us": 3000.0}, "crossover: microbatch where device time meets submission", None),
    ],
)
def test_own_configuration_follows_its_sliders(results, change, quantity, expected):
    value = lambda r: r.tables["own"].filter(pl.col("quantity") == quantity)["value"][0]  # noqa: E731
    got = value(load("tab47_workload_roles").run("model", **change))
    base = value(results["tab47_workload_roles"])
    assert got == pytest.approx(2 * base if expected is None else expected) and got != base


@pytest.mark.parametrize("submit_us, verdict", [(1500.0, "the CPU can stay ahead"), (20000.0, "the GPU can run dry")])
def test_the_figure_says_the_own_configuration(submit_us, verdict):
    result = load("tab47_workload_roles").run("model", rank_microbatch_tokens=8192, gpus=64, submit_us=submit_us)
    text = " ".join(a.text for a in result.figure().layout.annotations)
    assert "26.688 B total, 2.906 B active; 10.89 % active, 9.18x gap" in text and "on 64 GPUs, EP 8" in text
    assert f"at 8,192 {verdict}" in text


def test_bad_configurations_are_refused():
    with pytest.raises(ValueError, match="top_k"):
        load("tab47_workload_roles").run("model", top_k=16, routed_experts=8)
    with pytest.raises(ValueError, match="whole microbatches"):
        load("b3_fsdp_endpoints").run("model", global_batch_Mi=0.25, rank_sequences=7, world=256)


def test_report_rows_hold_nothing_computed():
    result = load("tab50_throughput_runs").run("report")
    assert result.table.height == 16 and "mfu_bf16_ref" not in result.table.columns
    assert result.badge == "transcribed from the report"
    result.figure()


def test_tokens_and_mfu_close(results):
    row = results["tab50_throughput_runs"].table.row(1, named=True)
    assert row["mfu_bf16_ref"] == pytest.approx(903 / 2250)
    assert row["tokens_per_s_per_gpu_at_most"] == pytest.approx(903e12 / (6 * 1.59e9))
    assert row["step_s_at_least"] == pytest.approx(8 * 2**20 / (row["tokens_per_s_per_gpu_at_most"] * 16))
    assert row["days_at_least"] == pytest.approx(2e12 / (row["tokens_per_s_per_gpu_at_most"] * 16) / 86400)
    assert row["microbatches"] == 8
    rates = results["tab50_throughput_runs"].table["mfu_bf16_ref"]
    assert rates.min() > 0.3 and rates.max() < 0.41


def test_endpoints_of_the_reference(results):
    rows = results["b3_fsdp_endpoints"].table.filter((pl.col("sweep") == "world") & (pl.col("world") == 64))
    at = {r["policy"]: r for r in rows.to_dicts()}
    full, ddp = at["fsdp_full_reshard"], at["ddp_sharded_optimizer"]
    dense, routed = 1.3207e9, 25.36715e9 / 8
    assert ddp["weights_GiB"] * 2**30 == pytest.approx(2 * (dense + routed))
    assert ddp["optimizer_GiB"] * 2**30 == pytest.approx(12 * (dense / 64 + routed / 8))
    assert full["gather_GB"] * 1e9 == pytest.approx(12 * 2 * 2 * (dense * 63 / 64 + routed * 7 / 8))
    assert full["microbatches"] == 12


def test_retention_reads_the_files(tmp_path, monkeypatch):
    folder = tmp_path / "recorded" / "x" / "2026-01-01_h200_0000000"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({"protocol": {"timer": "t"}, "raw_outputs": {"files": {}}}))
    (folder / "table.csv").write_text("step_time_ms,peak_allocated_bytes\n1,2\n")
    (tmp_path / "report").symlink_to(data_root() / "report")
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    result = load("tab51_metric_definitions").run("model")
    kept = result.table.filter(pl.col("retained_by") > 0)
    assert kept["slug"].to_list() == ["step_time", "peak_device_memory"]
    assert set(kept["where"]) == {"x/2026-01-01_h200_0000000"}


@pytest.mark.parametrize("slug", SLUGS)
def test_legends_tell_report_from_model(results, slug):
    fig = results[slug].figure()
    shown = [t.name for t in fig.data if t.showlegend is not False]
    if slug == "tab47_workload_roles":
        assert sum("(report)" in n for n in shown) == 2 and sum("(model" in n for n in shown) == 4
    if slug == "tab50_throughput_runs":
        assert all("(report)" in n for n in shown) and len(shown) == 5
    assert len(shown) >= 2 and fig.layout.meta["badge"] == "computed by a model"
