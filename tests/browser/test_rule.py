"""The front-end's rule against the vectors that the Python model is tested with, in the browser that runs it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from workbench.widgets.timeline import STATIC

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "queue_vectors.json").read_text(encoding="utf-8"))

NAMES = """simulate, streamCurve, deviceCurve, idleIntervals, hostAt, deviceAt, queuedOps, queuedBlocksCurve,
  blocksAheadCurve, curveAt"""
RULE = f"{(STATIC / 'simulate.js').read_text(encoding='utf-8')}\nreturn {{ {NAMES} }};"

RUN = """
([source, cases]) => {
  const q = new Function(source)();
  const plain = (c) => ({ t: [...c.t], before: [...c.before], after: [...c.after] });
  return cases.map(({ program, expect }) => {
    const sim = q.simulate(program);
    const over = (names, f) => Object.fromEntries(Object.keys(names).map((name) => [name, f(name)]));
    return {
      host_start: [...sim.hostStart],
      host_end: [...sim.hostEnd],
      op_submitted: sim.submitted,
      op_start: sim.start,
      op_end: sim.end,
      makespan: sim.makespan,
      headroom_stream: over(expect.headroom_stream, (lane) => plain(q.streamCurve(sim, lane))),
      headroom_device: over(expect.headroom_device, (device) => plain(q.deviceCurve(sim, Number(device)))),
      idle: over(expect.idle, (device) => q.idleIntervals(sim, Number(device))),
      queries: expect.queries.map((query) => ({
        t: query.t,
        cpu: over(query.cpu, (thread) => q.hostAt(sim, Number(thread), query.t)),
        gpu: over(query.gpu, (device) => q.deviceAt(sim, Number(device), query.t)),
        queued_ops: q.queuedOps(sim, query.t),
        queued_blocks: q.curveAt(q.queuedBlocksCurve(sim), query.t),
        headroom: over(query.headroom, (device) => q.curveAt(q.deviceCurve(sim, Number(device)), query.t)),
        blocks_ahead: q.curveAt(q.blocksAheadCurve(sim), query.t),
      })),
    };
  });
}
"""


def differences(got: Any, expected: Any, where: str = "") -> list[str]:
    """Return every place where two JSON values differ; numbers may differ by 1e-9, the vectors' own tolerance."""
    if isinstance(expected, dict) and isinstance(got, dict):
        if got.keys() != expected.keys():
            return [f"{where}: keys {sorted(got)}, expected {sorted(expected)}"]
        return [d for k in expected for d in differences(got[k], expected[k], f"{where}.{k}")]
    if isinstance(expected, list) and isinstance(got, list):
        if len(got) != len(expected):
            return [f"{where}: {len(got)} values, expected {len(expected)}"]
        return [d for i, (a, b) in enumerate(zip(got, expected)) for d in differences(a, b, f"{where}[{i}]")]
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return [] if math.isclose(got, expected, rel_tol=0, abs_tol=1e-9) else [f"{where}: {got}, expected {expected}"]
    return [] if got == expected else [f"{where}: {got!r}, expected {expected!r}"]


def test_the_rule_equals_the_vectors(open_page: Any) -> None:
    page = open_page("about:blank").page
    results = page.evaluate(RUN, [RULE, VECTORS["cases"]])
    assert len(results) == len(VECTORS["cases"]) > 20
    wrong = [d for case, got in zip(VECTORS["cases"], results) for d in differences(got, case["expect"], case["name"])]
    assert wrong == []


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"kind": "wait", "label": "w", "op": "absent"}], "no earlier operation is called absent"),
        ([{"kind": "wait", "label": "w", "event": "absent"}], "no earlier event is called absent"),
        ([{"kind": "work", "label": "w", "cost": -1}], "expected a finite time >= 0, got -1"),
        ([{"kind": "pop"}], "no open range"),
        ([{"kind": "jump"}], "expected submit, work, wait"),
    ],
)
def test_a_bad_program_is_refused_by_name(open_page: Any, steps: list[dict[str, Any]], message: str) -> None:
    page = open_page("about:blank").page
    run = """([source, steps]) => {
      const q = new Function(source)();
      try { q.simulate({ steps }); return ""; } catch (error) { return error.message; }
    }"""
    assert message in page.evaluate(run, [RULE, steps])
