"""The several-GPU experiments, over rows that two CPU ranks really produced and captures whose answer is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from changing import changed
from test_fig74_submission_regimes import build

from workbench.core.experiment import Check, Result
from workbench.core.record import Recording
from workbench.core.tables import grouped
from workbench.experiments import load

polars = pytest.importorskip("polars")
pytest.importorskip("torch")

from workbench.experiments import fig32_critical_microbatch_ep as critical_ep  # noqa: E402
from workbench.experiments import fig74_submission_regimes_ep as regimes_ep  # noqa: E402
from workbench.measure.multi_gpu import SECTIONS, Options, run  # noqa: E402
from workbench.measure.regimes import cut, packed, trace_name  # noqa: E402
from workbench.views.ranks import of_rank, on_every_rank, ranks_of  # noqa: E402
from workbench.views.regimes import capture_rows, skew_rows  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SHEET = load("op_expert_parallel")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(ROOT / "scripts" / "multi_gpu.py"), "--out", str(out), "--ranks", "2"]
    done = subprocess.run([*command, "--backend", "gloo"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((out / "rows.json").read_text())


def result(experiment: Any, rows: list[dict], by: str = "section", **params: Any) -> Result:
    plain = [{k: v for k, v in row.items() if k != "samples_us"} for row in rows]
    record = {"environment": {"gpu": "two of them", "links": {"nvlinks_per_gpu": 18, "nvlink_GBps_per_link": 26.5}}}
    kept = Recording(experiment.slug, "live", record)
    return experiment.result(experiment.params(**params), "live", grouped(plain, by), kept)


def sheet(rows: list[dict]) -> Result:
    return result(SHEET, [row for row in rows if row["section"] in ("parity", "bandwidth", "layer")])


def test_two_cpu_ranks_equal_one_and_run_every_section(rows):
    assert {row["section"] for row in rows} >= {"start", "parity", "bandwidth", "layer", "step", "critical", "pool"}
    assert {row["name"] for row in rows if row["section"] == "section"} == set(SECTIONS)
    assert {row["rank"] for row in rows} == {0, 1}
    assert sheet(rows).checks[0].holds is True
    assert len([row for row in rows if row["section"] == "parity"]) == 2 * 2 * 7


def test_an_unknown_section_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"sections: expected some of parity, .*got speed"):
        run(Options(out=str(tmp_path), sections=("speed",)), 2)


def test_more_ranks_than_gpus_are_refused_before_any_starts(tmp_path):
    with pytest.raises(ValueError, match=r"ranks: expected at most one per GPU \(\d+\), got 99"):
        run(Options(out=str(tmp_path)), 99)


def test_a_rank_that_takes_too_long_ends_and_says_where_it_is(tmp_path, capfd):
    options = Options(out=str(tmp_path), sections=("parity",), backend="gloo", small=True, limit_s=0.2)
    with pytest.raises(Exception, match="terminated with exit code 1"):
        run(options, 2)
    assert "Timeout (0:00:00.2" in capfd.readouterr().err


def with_waits(rows: list[dict], rowwise: int = 0, synchronized: int = 1) -> list[dict]:
    out = []
    for row in rows:
        if row["section"] == "layer":
            row = row | {"waits": {"rowwise": rowwise, "synchronized": synchronized}[row["path"]], "pageable_d2h": 0}
        out.append(row)
    return out


def test_waits_decide_their_claims(rows):
    assert [c.holds for c in sheet(rows).checks][1:3] == [None, None], "CPU ranks count no waits"
    assert [c.holds for c in sheet(with_waits(rows)).checks][1:3] == [True, True]
    assert [c.holds for c in sheet(with_waits(rows, rowwise=1)).checks][1:3] == [False, True]
    assert [c.holds for c in sheet(with_waits(rows, synchronized=2)).checks][1:3] == [True, False]
    copies = [r | {"pageable_d2h": r["rank"]} if r["section"] == "layer" else r for r in with_waits(rows)]
    assert [c.holds for c in sheet(copies).checks][1:3] == [False, True], "a pageable copy waits where nobody counts it"


def test_one_size_at_which_rowwise_is_slower_fails_the_claim(rows):
    sizes = sorted({r["tokens"] for r in rows if r["section"] == "layer"})
    for slower_at, holds in ((None, True), (sizes[-1], False)):
        timed = [
            r | {"time_us_p50": 9.0 if (r["path"] == "rowwise") == (r["tokens"] == slower_at) else 1.0}
            if r["section"] == "layer" else r
            for r in rows
        ]  # fmt: skip
        (check,) = [c for c in sheet(timed).checks if "at every size" in c.claim]
        assert len(sizes) > 1 and check.holds is holds


def test_one_wrong_tensor_fails_parity(rows):
    wrong = [dict(row) for row in rows]
    next(row for row in wrong if row["section"] == "parity")["holds"] = False
    assert sheet(wrong).checks[0].holds is False


def test_bytes_that_cross_to_a_peer_are_those_of_the_remote_routes(rows):
    by_call = {(r["call"], r["rank"]): r for r in rows if r["section"] == "bandwidth"}
    routed = 64 * 2 * 32 * 4
    for rank in (0, 1):
        dispatch, backward = by_call["dispatch", rank], by_call["combine, backward", rank]
        assert dispatch["bytes"] == routed and 0 < dispatch["remote_bytes"] < routed
        assert backward["remote_bytes"] == 2 * dispatch["remote_bytes"]
    # What one rank of two sends stays with it or is what the other takes.
    copy = by_call["peer copy, write", 0]
    assert copy["bytes"] == copy["remote_bytes"] and by_call["local copy", 0]["remote_bytes"] == 0


@pytest.mark.parametrize("rate, holds", [(90.0, True), (80.0, False)])
def test_the_slower_rank_decides_the_bandwidth_claim(rows, rate, holds):
    changed = []
    for row in rows:
        if row["section"] == "bandwidth":
            row = row | {"remote_GBps": 100.0}
            if row["call"] == "combine" and row["rank"] == 1:
                row = row | {"remote_GBps": rate}
        changed.append(row)
    assert sheet(changed).checks[3].holds is holds


def test_the_sheet_shows_the_slowest_rank(rows):
    figure = SHEET.figure(sheet(rows))
    shown = next(t for t in figure.data if t.name == "rowwise")
    measured = [r["time_us_p50"] for r in rows if r["section"] == "layer" and r["path"] == "rowwise"]
    assert max(shown.y) == pytest.approx(max(measured) / 1e3)
    assert any("NVLink 477" in (a.text or "") for a in figure.layout.annotations)


CRITICAL = ("critical", "repeats")


def critical(rows: list[dict], **params: Any) -> Result:
    return result(critical_ep.EXPERIMENT, [r for r in rows if r["section"] in CRITICAL], **params)


def test_every_rank_has_its_own_crossover(rows):
    slower = []
    for row in rows:
        if row["section"] in CRITICAL:
            size = row["tokens"] * (1.0 if row["rank"] == 0 else 0.5)
            row = row | {"submit_us": 16.0, "device_us": size, "idle_share": 0.2 if size < 16 else 0.0,
                         "wall_us_p50": 20.0}  # fmt: skip
        slower.append(row)
    found = critical(slower)
    agree = [c for c in found.checks if "agree" in c.claim]
    assert [c.holds for c in agree] == [False] * 4 and agree[0].value == "16, 32 tokens"
    assert ranks_of(found) == [0, 1]
    shown = {r: found.with_params(rank=r).figure().layout.title.text for r in (0, 1)}
    assert "rank 1" in shown[1] and shown[0] != shown[1]
    with pytest.raises(ValueError, match=r"rank 7 was not measured: expected one of \[0, 1\]"):
        of_rank(found, 7)
    beside = critical_ep.beside_one_gpu(found)
    assert {"2 GPUs, rank 0", "2 GPUs, rank 1", "one GPU (recorded)"} == set(beside["where"])


def test_one_rank_whose_host_is_held_up_fails_the_claim_of_all(rows):
    for late in (None, 1):
        seen = [r | {"host_held_up": r["rank"] == late} if r["section"] == "critical" else r for r in rows]
        held = [c for c in critical(seen).checks if "waits for no device value" in c.claim]
        assert held and {c.holds for c in held} == {late is None}


def test_measured_routes_of_the_critical_layer_do_not_change(rows):
    from workbench.measure.blocks import Layers

    assert all(r["dropped"] == 0 for r in rows if r["section"] == "critical")
    with pytest.MonkeyPatch.context() as patch:
        import torch.distributed as dist

        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: 2)
        with pytest.raises(ValueError, match="router_mode: expected learned or uniform"):
            Layers(8, None, small=True)


LATE = 40.0
"""By how much rank 1 comes late to each exchange, us."""


def capture(wait: bool, late: float) -> dict[str, Any]:
    """A rank's step: what a rank that comes `late` does not wait, its peer waits inside the exchange."""
    trace = build(wait=wait)
    for event in trace["traceEvents"]:
        if event["name"] == "combine":
            event["name"] = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
            event["ts"], event["dur"] = event["ts"] + late, event["dur"] - late
    return trace | {"baseTimeNanoseconds": 5_000_000_000}


@pytest.fixture(scope="module")
def captures(tmp_path_factory) -> dict[tuple[str, int], Path]:
    folder, out = tmp_path_factory.mktemp("captures"), {}
    for variant in ("synchronized", "synchronized, wait covered", "synchronized, host loop", "rowwise"):
        for rank in (0, 1):
            trace = cut(capture(variant != "rowwise", LATE * rank), "microbatch 1")
            out[variant, rank] = folder / trace_name(variant, 64, rank)
            out[variant, rank].write_bytes(packed(trace))
    return out


def test_the_rank_that_comes_last_to_an_exchange_is_found(captures):
    rows = skew_rows([captures["rowwise", rank] for rank in (0, 1)], "microbatch 1")
    together = [r for r in rows if r["part"] == "collective"]
    assert len(together) == 4 and {r["label"] for r in together} == {"ncclDevKernel_SendRecv"}
    assert {(r["last_rank"], r["skew_us"], r["duration_us"]) for r in together} == {(1, LATE, 100.0 - LATE)}
    ranks = {r["rank"]: r for r in rows if r["part"] == "rank"}
    assert (ranks[0]["peer_wait_us"], ranks[1]["peer_wait_us"]) == (4 * LATE, 0)
    assert ranks[0]["communication_us"] == 4 * 100.0 and ranks[0]["row_kernels_us"] == 0
    starts = [r for r in rows if r["part"] == "block start"]
    assert len(starts) == 8 and all(r["skew_us"] == 0 for r in starts)


@pytest.fixture(scope="module")
def regimes(rows, captures) -> Result:
    out = [r | {"waits": regimes_ep.WAITS.get(r["variant"], 99), "pageable_d2h": 0} if r["part"] == "rank step" else r
           for r in regimes_ep.rank_rows(rows)]  # fmt: skip
    variants = list(dict.fromkeys(v for v, _ in captures))
    for rank in (0, 1):
        found = capture_rows({v: captures[v, rank] for v in variants}, "microbatch 1")
        out += [{"length": 16, "rank": rank, **r} for r in found]
    for v in variants:
        found = skew_rows([captures[v, rank] for rank in (0, 1)], "microbatch 1")
        out += [{"variant": v, "length": 16} | r for r in found]
    return result(regimes_ep.EXPERIMENT, out, by="part", sequences=2, length=16)


def test_a_step_is_as_slow_as_its_slowest_rank():
    found = [
        {"section": "step", "variant": "rowwise", "length": 8, "restart": 0, "rank": 0, "samples_ms": [1.0, 9.0, 2.0]},
        {"section": "step", "variant": "rowwise", "length": 8, "restart": 0, "rank": 1, "samples_ms": [4.0, 3.0, 5.0]},
    ]
    (row,) = regimes_ep.rank_rows(found)
    assert row["step_ms"] == 5.0 and row["process"] == 0


def test_every_rank_is_checked_and_shown(regimes):
    claims = {c.claim: c for c in regimes.checks}
    every = "synchronized: one host wait in every routed block's forward, on every rank"
    assert claims[every].holds is True
    assert claims["rowwise: 0 host waits in a whole step, on every rank"].holds is True
    twice = polars.when(polars.col("rank") == 1).then(2).otherwise(polars.col("waits")).alias("waits")
    other = changed(regimes, "block", twice)
    assert {c.claim: c for c in other.checks}[every].holds is False, "rank 1 alone breaks the claim"
    with pytest.raises(ValueError, match=r"rank 2 was not measured: expected one of \[0, 1\]"):
        of_rank(regimes, 2)
    assert regimes_ep.view(regimes.with_params(rank=1))["title"].endswith(", rank 1")
    assert "rank 1" in regimes.with_params(rank=1).figure().layout.title.text
    skew = next(t for t in regimes_ep.draw_skew(regimes).data if t.name == "rowwise")
    assert set(skew.y) == {LATE} and {last for _, last in skew.customdata} == {1}


@pytest.mark.parametrize(
    "column, claim",
    [
        ("waits", "rowwise: 0 host waits in a whole step, on every rank"),
        ("pageable_d2h", "rowwise: 0 host waits in a whole step, on every rank"),
        ("dropped", "rowwise drops no route at capacity factor 1.25"),
    ],
)
def test_one_more_on_one_rank_fails_the_claim_of_whole_steps(regimes, column, claim):
    mine = (polars.col("variant") == "rowwise") & (polars.col("rank") == 1)
    for count, holds in ((0, True), (1, False)):
        new = polars.when(mine).then(count).otherwise(polars.col(column)).alias(column)
        other = changed(regimes, "rank_step", new)
        assert {c.claim: c for c in other.checks}[claim].holds is holds


def test_a_reason_known_on_one_rank_excuses_no_other():
    known, unknown, good = Check("c", False, "a", "why"), Check("c", False, "b"), Check("c", True, "d")
    for same, fails in (((known, unknown), True), ((good, unknown), True), ((known, known), False)):
        assert on_every_rank(same).fails is fails
    assert not on_every_rank((known, good)).fails


def test_a_rank_that_fails_decides_the_claim_whatever_another_leaves_undecided():
    undecided, bad, good = Check("c", None, "a"), Check("c", False, "b"), Check("c", True, "a")
    for same in ((undecided, bad), (bad, undecided), (good, undecided, bad)):
        joined = on_every_rank(same)
        assert joined.fails and f"rank {same.index(bad)} fails: b" in str(joined.value)
    assert on_every_rank((good, undecided)).holds is None
    assert on_every_rank((good, undecided)).value == "rank 0 holds: a | rank 1 undecided: a"
    assert on_every_rank((good, good)).value == "a"


def test_ranks_that_wait_longer_without_host_waits_fail_the_claim(regimes):
    claim = "synchronized ranks wait longer for each other than rowwise ones"
    for longer, holds in (("synchronized", True), ("rowwise", False)):
        waited = polars.when(polars.col("variant") == longer).then(9.0).otherwise(1.0)
        other = changed(regimes, "rank", waited.alias("peer_wait_us"))
        (check,) = [c for c in other.checks if claim in c.claim]
        assert check.holds is holds
        assert not check.fails, "rank 1 is the last at every meeting: a slow GPU is the reason"
    by_turns = polars.when(polars.col("block") == 0).then(0).otherwise(polars.col("last_rank")).alias("last_rank")
    (check,) = [c for c in changed(other, "collective", by_turns).checks if claim in c.claim]
    assert check.fails and "rank 1 comes last at 3 of 4 rowwise meetings" in check.value


def test_costs_and_skews_say_what_was_built_in(regimes):
    costs = {(r["variant"], r["rank"]): r for r in regimes_ep.costs(regimes).to_dicts()}
    assert costs["rowwise", 0]["peer_wait"] == pytest.approx(4 * LATE / 1e3)
    assert costs["rowwise", 1]["peer_wait"] == 0 and costs["rowwise", 0]["host_wait"] == 0
    assert costs["synchronized", 0]["host_wait"] > 0
    skews = {(r["variant"], r["part"]): r for r in regimes_ep.skews(regimes).to_dicts()}
    assert skews["rowwise", "collective"]["median_us"] == LATE and skews["rowwise", "collective"]["count"] == 4


def test_both_paths_stand_beside_one_gpu(regimes):
    table = regimes_ep.beside_one_gpu(regimes)
    assert table["where"].to_list() == ["2 GPUs, rank 0", "2 GPUs, rank 1"] * 2, (
        "one GPU was not captured at this length"
    )
    assert table.filter(polars.col("variant") == "rowwise")["forward idle"].to_list() == ["0.00%", "13.33%"]


def test_a_crossover_beyond_the_sizes_decides_no_claim(rows):
    dear = []
    for row in rows:
        if row["section"] in CRITICAL:
            row = row | {"submit_us": 1e6, "device_us": float(row["tokens"]), "idle_share": 0.5, "wall_us_p50": 1e6}
        dear.append(row)
    undecided = [c for c in critical(dear).checks if "moves the crossover right" in c.claim or "beyond" in c.claim]
    assert len(undecided) == 6 and {c.holds for c in undecided} == {None}


SLUGS = ("fig74_submission_regimes_ep", "fig32_critical_microbatch_ep", "op_expert_parallel")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Result]:
    return {slug: load(slug).run("recorded") for slug in SLUGS}


@pytest.mark.parametrize("slug", SLUGS)
def test_recorded_claims_hold_or_are_known(recorded, slug):
    checks = recorded[slug].checks
    assert len(checks) >= 5 and [c.claim for c in checks if c.fails] == []


@pytest.mark.parametrize("slug", SLUGS)
def test_every_badge_counts_the_gpus(recorded, slug):
    result = recorded[slug]
    figures = [result.figure(), *([regimes_ep.draw_skew(result)] if slug == SLUGS[0] else [])]
    for said in (result.badge, *(f.layout.title.subtitle.text.removeprefix("■ ") for f in figures)):
        assert said.startswith("recorded on 2 x NVIDIA H200, 2026-")


def test_the_pinned_ranks_traces_say_what_the_table_says(recorded):
    kept = recorded["fig74_submission_regimes_ep"]
    for variant in ("synchronized", "rowwise"):
        paths = [kept.recording.file(trace_name(variant, 8192, rank)) for rank in (0, 1)]
        again = [r["skew_us"] for r in skew_rows(paths, "microbatch 1") if r["part"] == "collective"]
        chosen = polars.col("variant") == variant
        assert again == kept.tables["collective"].filter(chosen & (polars.col("length") == 8192))["skew_us"].to_list()
        assert len(again) == 35, "five for each of seven routed blocks, forward and backward"


def test_a_table_of_one_start_says_so_and_the_recording_has_five(recorded):
    kept = recorded["fig74_submission_regimes_ep"]
    assert kept.recording.record["protocol"]["restarts"] == 5
    first = polars.col("process") == 0
    for result, said, starts in (
        (kept, "every process start", "(5)"),
        (changed(kept, "step", keep=first), "the one process start there is", "one start"),
    ):
        assert any(f"in {said}" in c.claim for c in result.checks)
        beside = regimes_ep.beside_one_gpu(result).filter(polars.col("where") != "one GPU (recorded)")
        assert all(text.endswith(starts) for text in beside["over starts"])


def test_crossing_rates_of_the_recording_stay_below_the_links(recorded):
    from workbench.experiments.op_expert_parallel import nvlink_GBps

    kept = recorded["op_expert_parallel"]
    moved = kept.tables["bandwidth"]
    limit = nvlink_GBps(kept)
    assert limit == pytest.approx(18 * 26.562)
    # A backward combine reads and writes: its bytes go both ways.
    one_way = moved.filter(polars.col("call") != "combine, backward")["remote_GBps"]
    assert one_way.max() < limit and moved["remote_GBps"].max() < 2 * limit
