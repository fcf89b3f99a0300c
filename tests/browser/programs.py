"""Programs and view specs for browser tests; plain JSON, so that a notebook cell can hold them."""

from __future__ import annotations

from typing import Any

# Counts what is painted for each frame of a timeline: window.painted has one number a frame.
COUNT = """
(stage) => {
  let calls = 0;
  const pen = CanvasRenderingContext2D.prototype;
  for (const name of ["fill", "stroke", "fillText"]) {
    const paint = pen[name];
    pen[name] = function (...args) {
      calls += 1;
      return paint.apply(this, args);
    };
  }
  window.painted = [];
  new MutationObserver(() => {
    window.painted.push(calls);
    calls = 0;
  }).observe(stage, { attributes: true, attributeFilter: ["data-frame"] });
}
"""
# A lane shows at most 2,000 boxes, each filled, edged and labelled; more become shares of each pixel's time.
MOST_PAINTED = 2 * 3 * 2000
CURSOR_PAINTED = 20


def running_dry(blocks: int, submit: float = 1.55, execute: float = 1.0) -> dict[str, Any]:
    """A program of `blocks` blocks, one submission and one operation each."""
    steps: list[dict[str, Any]] = []
    for i in range(1, blocks + 1):
        operation = {"label": f"b{i}", "duration": execute}
        steps += [
            {"kind": "push", "name": f"b{i}", "level": "block"},
            {"kind": "submit", "label": f"b{i}", "cost": submit, "ops": [operation]},
            {"kind": "pop"},
        ]
    lead = [{"label": "lead", "duration": 2 * execute}]
    return {"schema": 1, "name": "running dry", "time_unit": "figure units", "lead": lead, "steps": steps}


def view(blocks: int, **changes: Any) -> dict[str, Any]:
    """A view of `running_dry` with one slider that re-times every submission."""
    sets = [{"timeline": "main", "path": ["steps", 3 * i + 1, "cost"]} for i in range(blocks)]
    slider = {"id": "submit", "label": "Submission cost", "unit": "figure units", "min": 0.5, "max": 5.0, "step": 0.05}
    panel = {
        "id": "a",
        "title": "Slow submission",
        "caption": "",
        "timelines": [
            {
                "id": "main",
                "title": "",
                "program": running_dry(blocks),
                "rows": [
                    {"type": "lane", "lane": "cpu0", "label": "CPU submits"},
                    {"type": "lane", "lane": "gpu0/s0", "label": "GPU executes"},
                    {"type": "curve", "curve": "headroom", "device": 0, "label": "headroom H(t)"},
                ],
                "marks": [{"anchor": {"op": 1}, "edge": "start", "row": 1, "text": "1"}],
            }
        ],
        "cursor": 5.0,
        "controls": [slider | {"value": 1.55, "report": 1.55, "sets": sets}],
        "readouts": [
            {"type": "cpu", "label": "CPU at the cursor", "timeline": "main", "thread": 0},
            {"type": "gpu", "label": "GPU at the cursor", "timeline": "main", "device": 0},
            {"type": "headroom", "label": "Headroom", "timeline": "main", "device": 0},
            {"type": "queued_blocks", "label": "Queued blocks", "timeline": "main"},
            {"type": "total", "metric": "idle", "label": "GPU idle", "timeline": "main", "device": 0},
        ],
        "legend": ["cpu_submit", "gpu_execute", "idle", "headroom"],
    }
    return {"title": f"{2 * blocks} boxes", "badge": "conceptual model", "layout": "stack", "panels": [panel | changes]}
