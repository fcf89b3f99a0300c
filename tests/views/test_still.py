"""The timeline as SVG: boxes where they belong, nothing that is not text from a trace's names."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from workbench.core.colours import COLOURS
from workbench.views.still import GUTTER, WIDTH, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


def box(lane, kind, start, end):
    return {"lane": lane, "kind": kind, "start_us": start, "end_us": end}


def test_boxes_and_curve_lie_in_proportion():
    boxes = [
        box("CPU", "cpu_submit", -9.0, 25.0), box("GPU", "gpu_execute", 50.0, 100.0), box("GPU", "idle", 25.0, 50.0),
    ]  # fmt: skip
    curve = [{"lane": "GPU", "at_us": 50.0 * i, "queued_us": 8.0 * i} for i in (0, 1)]
    root = ET.fromstring(timeline_svg({"boxes": boxes, "headroom": curve}))
    plot = WIDTH - GUTTER - 10
    boxes = [r for r in root.iter(f"{SVG}rect") if float(r.get("height", 0)) > 12]
    found = {r.get("fill"): (float(r.get("x", 0)) - GUTTER, float(r.get("width", 0))) for r in boxes}
    assert found == {
        COLOURS["cpu_submit"]: (0, plot / 4),
        COLOURS["gpu_execute"]: (plot / 2, plot / 2),
        COLOURS["idle"]: (plot / 4, plot / 4),
    }
    assert len({r.get("y") for r in boxes}) == 2, "one row a lane"
    (curve,) = root.iter(f"{SVG}polyline")
    (x0, y0), (x1, y1) = (tuple(map(float, p.split(","))) for p in curve.get("points", "").split())
    assert (x0, x1) == (GUTTER, GUTTER + plot / 2) and y1 < y0, "a larger value lies higher"
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"CPU", "GPU", "GPU execution", "headroom, to 8 us", "100 us"} <= set(texts)


def test_names_stay_text_and_an_empty_table_is_a_picture():
    hostile = "<script>x</script>&"
    root = ET.fromstring(timeline_svg({"boxes": [box(hostile, "copy", 0.0, 1.0)], "headroom": []}))
    assert hostile in [t.text for t in root.iter(f"{SVG}text")] and not list(root.iter("script"))
    assert ET.fromstring(timeline_svg({"boxes": [], "headroom": []})).tag == f"{SVG}svg"
