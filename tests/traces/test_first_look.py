"""The first look's rounds: stretches found, predictions within a round, and a live run that keeps its traces."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from kineto_files import call, event, kernel, launch, text, write
from test_replay import loop

import workbench
from workbench.core.record import Recorder, Recording
from workbench.experiments import tool_first_look
from workbench.traces import read
from workbench.traces.idle import Analysis
from workbench.views.trace import opened, prediction_checks, sums, sums_table

K = 1_000
PAUSE = 50_000 * K


def shifted(events: list[dict], by: int, ids: int) -> list[dict]:
    out = []
    for e in events:
        args = {k: v + ids if k == "correlation" else v for k, v in e["args"].items()}
        out.append(e | {"ts": e["ts"] + by, "args": args})
    return out


def graph(n: int) -> list[dict]:
    nodes = [kernel(10 * K + i * 30 * K, 40 * K + i * 30 * K, 1) for i in range(n)]
    return [call("cudaGraphLaunch", 2 * K, 10 * K, 1), *nodes]


def rounds(slow: tuple[int, ...]) -> list[dict]:
    """One trace of several rounds; in round i the host and the device run `slow[i]` times slower."""
    events: list[dict] = []
    number = 0
    for i, factor in enumerate(slow):
        for variant, made in (
            ("free", loop(False)),
            ("loaded", loop(False)),
            ("item", loop(True)),
            ("graph", graph(6)),
        ):
            host = [e for e in made if e["cat"] == "cuda_runtime"]
            end = max(e["ts"] + e["dur"] for e in host) + 1 * K
            blocks = [e for e in host if e["name"] == "cudaLaunchKernel"]
            made = [
                *(
                    event("user_annotation", f"block {j}", e["ts"] - 2 * K, e["ts"] + 9 * K)
                    for j, e in enumerate(blocks)
                ),
                event("user_annotation", f"{variant} {i}", 0, end),
                event("user_annotation", f"ProfilerStep#{number}", 1 * K, end - 500),
                *(e for e in made if e["cat"] != "python_function"),
            ]
            made = [e | {"ts": e["ts"] * factor, "dur": e["dur"] * factor} for e in made]
            events += shifted(made, (number + 1) * PAUSE, (number + 1) * 10_000)
            number += 1
    return events


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    for size in tool_first_look.SIZES:
        (tmp_path / f"{size}.json.gz").write_bytes(gzip.compress(text(rounds((1, 3, 2))).encode()))
    return Recording("tool_first_look", "made", {"workload": {}}, tmp_path)


def test_stretches_and_the_round_of_median_span(recording: Recording) -> None:
    found = tool_first_look.stretches(Analysis(read(recording.file("long.json.gz"))))
    assert {v: len(s) for v, s in found.items()} == {"free": 3, "loaded": 3, "item": 3, "graph": 3}
    first = found["free"][0]
    assert first.start_ns == PAUSE and first.host_end_ns == PAUSE + 61 * K and first.device_end_ns == PAUSE + 190 * K
    assert tool_first_look.shown(found) == {v: s[2] for v, s in found.items()}


def test_each_round_is_compared_with_itself(recording: Recording) -> None:
    experiment = workbench.load("tool_first_look")
    params = experiment.params(blocks=3, profiled_steps=2)
    pair = tool_first_look.opens(params, recording)
    result = experiment.result(params, "live", experiment.recorded(params, pair), recording, pair)
    unchanged, removed, scaled, merged, speed = prediction_checks(result)
    assert speed.holds is None and speed.value == "median 1.00 (1.00 to 1.00 over 3 rounds)"
    for check in (unchanged, removed, scaled, merged):
        low, high = (float(x) for x in check.value.split("(")[1].split(" over")[0].split(" to "))
        assert check.holds and high / low < 1.05 and "over 3 rounds" in check.value
    assert "median ratio 1.000 (1.000 to 1.000" in unchanged.value
    found = sums(result)
    assert found["without .item()"]["waits"] == 0 and found["with .item()"]["waits"] == 6
    table = {row["us"]: row for row in sums_table(result).to_dicts()}
    assert table["waits"] == {"us": "waits", "without .item()": 0.0, "with .item()": 6.0}
    assert table["idle"]["with .item()"] == found["with .item()"]["idle"] and "sync blocked" in table
    assert [c.claim for c in result.checks if c.fails] == []
    analysis, window = opened(result)
    assert window == tool_first_look.shown(tool_first_look.stretches(analysis))["item"].window


def test_a_wrong_prediction_is_no_claim_held(recording: Recording) -> None:
    experiment = workbench.load("tool_first_look")
    tables = tool_first_look.recorded(experiment.params(), tool_first_look.opens(experiment.params(), recording))
    for r in tables["what_if"]:
        if r["case"] == "waits removed":
            r["predicted_us"] *= 1.2
    result = experiment.result(experiment.params(), "live", tables, recording)
    assert [c.holds for c in prediction_checks(result)] == [True, False, True, True, None]


def test_a_live_run_keeps_its_traces_for_the_views(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(params, recorder) -> None:
        recorder.row(size="long")
        for size in tool_first_look.SIZES:
            recorder.attach(f"{size}.json.gz", recording.file(f"{size}.json.gz"))

    monkeypatch.setattr("workbench.core.experiment.gpu_present", lambda: True)
    experiment = dataclasses.replace(workbench.load("tool_first_look"), measure=measure)
    result = experiment.run(source="live", profiled_steps=3)
    assert result.source == "live" and len(result.figure().data) > 3 and result.badge.startswith("measured live")
    assert opened(result)[1] is not None


def test_host_speed_compares_the_same_launches(tmp_path: Path) -> None:
    def block(at: int, pace: int, launches: int, ids: int) -> list[dict]:
        calls = [launch(at + (i + 1) * pace - K, at + (i + 1) * pace, ids + i) for i in range(launches)]
        ran = [kernel(at + (i + 1) * pace, at + (i + 1) * pace + K, ids + i) for i in range(launches)]
        return [event("user_annotation", "block 0", at, at + 100 * K), *calls, *ran]

    events = [
        event("user_annotation", "loaded 0", 0, 120 * K),
        event("user_annotation", "item 0", 200 * K, 320 * K),
        *block(10 * K, 10 * K, 2, 1),
        *block(210 * K, 20 * K, 3, 11),
    ]
    analysis = Analysis(read(write(tmp_path, events)))
    found = tool_first_look.stretches(analysis)
    assert tool_first_look._host_speed(analysis, found["loaded"][0], found["item"][0]) == 0.5


def test_step_times_are_summarised_from_the_samples_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop on a clock that each step moves by an uneven time: no GPU is needed to see which times are kept."""
    from workbench.measure import timing

    torch = pytest.importorskip("torch")
    clock, steps = [0], [0]

    def step(*_: object, **__: object) -> None:
        steps[0] += 1
        clock[0] += 1000 * (1 + steps[0] % 7)

    def nothing(*_: object, **__: object) -> Path:
        (tmp_path / "empty.json").write_text('{"traceEvents": []}')
        return tmp_path / "empty.json"

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr("workbench.measure.block_loop.build", lambda **_: step)
    monkeypatch.setattr("workbench.measure.timing.captured_graph", lambda calls: SimpleNamespace(replay=calls[0]))
    monkeypatch.setattr("workbench.measure.capture.capture", nothing)
    monkeypatch.setattr(tool_first_look, "_rounds", nothing)
    params = tool_first_look.FirstLookParams(steps=2, repeats=4)
    recorder = Recorder("tool_first_look", params.as_dict())
    tool_first_look.measure(params, recorder)
    variants = len(tool_first_look.SIZES) * len(tool_first_look.VARIANTS)
    assert steps[0] == variants * (3 + params.repeats * params.steps) and len(recorder.rows) == variants
    samples = json.loads(recorder._files["samples.json"])
    warm, before = 3 * variants, [1 + n % 7 for n in range(steps[0] + 1)]
    for i, row in enumerate(recorder.rows):
        first = [warm + 2 * (i + turn * variants) for turn in range(params.repeats)]
        kept = samples[f"step_us {row['size']} {row['variant']}"]
        assert kept == [(before[n + 1] + before[n + 2]) / 2 for n in first]
        assert {k: v for k, v in row.items() if k.startswith("step_us")} == timing.summary(kept, "step_us")
