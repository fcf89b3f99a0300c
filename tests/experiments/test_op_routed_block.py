"""The routed block's sheet: its claims follow the waits and times of the table, and its figure shows every row."""

from __future__ import annotations

import pytest

from workbench.core.experiment import Result
from workbench.core.record import Recorder
from workbench.experiments import load, op_routed_block
from workbench.experiments.op_routed_block import VARIANTS
from workbench.measure import processes

polars = pytest.importorskip("polars")
EXPERIMENT = load("op_routed_block")


def rows() -> list[dict]:
    out = []
    for level, passes, routed in (("layer", "forward", 1), ("layer", "forward + backward", 1), ("step", "step", 7)):
        for tokens in (1024, 4096):
            for path in VARIANTS:
                slow = 1.0 if path == "rowwise" else 1.5
                time_us = 1000.0 * slow * tokens / 1024
                waits = 0 if path == "rowwise" else routed if "host loop" not in path else 40 * routed
                out.append(
                    {"level": level, "pass": passes, "path": path, "tokens": tokens, "time_us_p20": 0.9 * time_us,
                     "time_us_p50": time_us, "time_us_p80": 1.2 * time_us, "starts": 3, "speedup_p50": 1.5 / slow,
                     "speedup_least": 1.4 / slow, "waits": waits, "pageable_d2h": 0, "launches": 100}
                )  # fmt: skip
    return out


def result(table: list[dict]) -> Result:
    return Result(
        experiment=EXPERIMENT, params=EXPERIMENT.params(), source="live", tables={"table": polars.DataFrame(table)}
    )


def holds(table: list[dict]) -> list[bool | None]:
    return [check.holds for check in result(table).checks]


def test_all_claims_hold_on_a_table_that_shows_them():
    assert holds(rows()) == [True, True, True, True]


@pytest.mark.parametrize(
    "path, column, value, failing",
    [
        ("rowwise", "waits", 1, 1),
        ("rowwise", "pageable_d2h", 1, 1),
        ("synchronized", "waits", 2, 0),
        ("synchronized, wait covered", "waits", 0, 0),
    ],
)
def test_a_wait_too_many_or_too_few_fails_its_claim(path, column, value, failing):
    table = rows()
    for row in table:
        if row["path"] == path:
            row[column] = value
    assert [i for i, held in enumerate(holds(table)) if held is False] == [failing]


def test_one_slower_start_of_one_size_fails_the_speed_claim():
    table = rows()
    for row in table:
        if (row["level"], row["path"], row["tokens"]) == ("step", "rowwise", 4096):
            row["speedup_least"] = 0.98
    assert holds(table) == [True, True, True, False]


def test_rows_pool_starts_and_pair_speedups_within_each(monkeypatch):
    # The host of the second start is ten times slower, and rowwise loses there: pooled medians would not show it.
    def start(times, count=False):
        counted = {"waits": 1, "pageable_d2h": 0, "launches": 47} if count else {}
        return [
            {"level": "layer", "pass": "forward", "path": path, "tokens": 1024, "times_us": [t], **counted}
            for path, t in zip(("synchronized", "rowwise"), times)
        ]

    earlier = iter([(30.0, 20.0), (180.0, 200.0)])
    monkeypatch.setattr(processes, "in_new_process", lambda function, params, timeout_s: start(next(earlier)))
    monkeypatch.setattr(op_routed_block, "visit", lambda params, count: start((60.0, 40.0), count))
    recorder = Recorder("op_routed_block", {})
    _, rowwise = op_routed_block.measure(op_routed_block.RoutedBlockParams(), recorder)
    assert (rowwise["starts"], rowwise["time_us_p50"], rowwise["waits"]) == (3, 40.0, 1)
    assert (rowwise["start_p50_least_us"], rowwise["start_p50_greatest_us"]) == (20.0, 200.0)
    assert (rowwise["speedup_p50"], rowwise["speedup_least"]) == (1.5, 0.9)


def test_the_figure_shows_every_path_and_size():
    figure = EXPERIMENT.figure(result(rows()))
    assert len(figure.data) == 2 * len(VARIANTS)
    assert all(list(trace.x) == [1024, 4096] for trace in figure.data)
    step = next(t for t in figure.data if t.name == "synchronized" and t.xaxis == "x2")
    assert list(step.y) == [1.5, 6.0] and list(step.customdata[0]) == [7, 100, 3, 1.0]
