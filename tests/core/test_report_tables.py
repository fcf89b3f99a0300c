"""The transcribed tables: types, anchors, and agreement with the report's own text where that is present."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench.core.report_tables as rt
from workbench.core.report_tables import COLUMNS, parse_printed, printed_rows, report_table


def squeeze(text: str) -> str:
    """Collapse white space, drop LaTeX's inline marks and thin spaces."""
    text = re.sub(r"\\\((.*?)\\\)", r"\1", text).replace("\\%", "%").replace("\\times", "×").replace("\\,", " ")
    text = re.sub(r"\\mathrm\{(\w+)\}", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


@pytest.fixture(scope="session")
def report(shared: Path) -> dict[str, str]:
    """The report's text by file: ``section`` and ``appendix``, as lines."""
    folder = shared / "report"
    files = {"section": "section-08-*.txt", "appendix": "appendix-b-*.txt"}
    found = {k: sorted(folder.glob(v)) for k, v in files.items()}
    if not all(found.values()):
        pytest.skip("the report's text is not on this machine")
    return {k: v[0].read_text(encoding="utf-8") for k, v in found.items()}


def body(report: dict[str, str], number: int) -> str:
    """Return the text of one table: from the blank line before its head row to its caption."""
    text = report["section" if number < 40 else "appendix"]
    before, caption, _ = text.partition(f"\nTable {number}. ")
    assert caption, f"no caption of Table {number}"
    head = {
        12: "Operations Effect Why",
        13: "Pattern Host wait Reason",
        14: "Mechanism Host dependency removed Cost accepted",
        45: "Item Audited value",
        46: "Role Model and batch",
        47: "Quantity 30-block reference",
        48: "Rows ",
        49: "Configuration Model Batch and scale",
        50: "Configuration Routing TFLOP/s",
        51: "Metric Definition",
    }[number]
    assert head in before, f"no head of Table {number}"
    return before[before.rindex(head) :]


def rows_by_first_cell(text: str, firsts: list[str]) -> list[str]:
    """Split a table's text at the lines that begin with its rows' first cells, in order."""
    at, position = [], 0
    for first in firsts:
        pattern = re.compile("^" + r"\s+".join(map(re.escape, first.split())) + r"(?=\s)", re.M)
        found = pattern.search(text, position)
        assert found, f"no row {first!r}"
        at.append(found.start())
        position = found.end()
    return [squeeze(text[a:b]) for a, b in zip(at, [*at[1:], len(text)])]


@pytest.mark.parametrize(
    "number, count", [(12, 8), (13, 5), (14, 3), (45, 15), (46, 2), (47, 21), (48, 3), (49, 11), (50, 16), (51, 10)]
)
def test_every_table_loads_typed_with_anchors(number, count):
    table = report_table(number)
    assert table.columns == ["anchor", *COLUMNS[number]] and table.height == count
    assert table["anchor"].null_count() == 0
    pattern = rf"Table {number}, row \d+|Section B\.4, paragraph \d"
    assert all(re.fullmatch(pattern, a) for a in table["anchor"])


@pytest.mark.parametrize("number", [12, 13, 14])
def test_word_tables_read_as_the_report(report, number):
    rows = printed_rows(number)
    columns = list(COLUMNS[number])
    lines = rows_by_first_cell(body(report, number), [r[columns[0]] for r in rows])
    for row, line in zip(rows, lines):
        assert line == squeeze(" ".join(row[c] for c in columns)), row["anchor"]


def test_table_45_values_are_printed_in_their_row(report):
    rows = printed_rows(45)
    items = list(dict.fromkeys(r["item"] for r in rows))
    lines = dict(zip(items, rows_by_first_cell(body(report, 45), items)))
    words = {"4": "four", "8": "eight"}
    for row in rows:
        assert row["printed"] in lines[row["item"]], row["anchor"]
        plain = row["printed"].replace(",", "").lower()
        assert row["value"].lower() in plain or words.get(row["value"], "?") in plain, row


def test_table_46_values_are_printed_in_their_row(report):
    rows = printed_rows(46)
    lines = rows_by_first_cell(body(report, 46), [r["role"] for r in rows])
    for row, line in zip(rows, lines):
        expected = [
            f"{row['blocks']} blocks",
            f"{row['routed_experts']} routed experts",
            f"top-{row['top_k']}",
            f"d={row['d_model']}",
            f"sequence {row['sequence_tokens']}",
            f"{row['global_batch_Mi']}-Mi-token global batch",
            f"EP-MP {row['ep']}",
            row["precision"],
            row["not_used"],
            row["purpose"],
        ]
        if row["nodes_min"]:
            expected.append(f"{row['nodes_min']}–{row['nodes_max']} nodes")
        assert [e for e in expected if e not in line] == [], row["anchor"]


def test_table_47_and_section_b4_read_as_the_report(report):
    """Reads the numbers from the text anew and compares them with the file."""
    lines = rows_by_first_cell(
        body(report, 47),
        [
            "Blocks and width",
            "Routed layer",
            "Routing and capacity",
            "Sequence and global batch",
            "Configuration-derived size",
        ],
    )
    numbers = lambda text: [t.replace(",", "") for t in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]  # noqa: E731
    t = {r["quantity"]: r for r in printed_rows(47)}
    both = lambda q: (t[q]["reference"], t[q]["profiling"])  # noqa: E731
    assert numbers(lines[0]) == [
        t["blocks"]["reference"],
        t["dense_blocks"]["reference"],
        t["routed_blocks"]["reference"],
        t["d_model"]["reference"],
        t["blocks"]["profiling"],
        t["dense_blocks"]["profiling"],
        t["routed_blocks"]["profiling"],
    ]
    assert numbers(lines[1]) == [
        t["routed_experts"]["reference"],
        t["top_k"]["reference"],
        t["expert_width"]["reference"],
        t["routed_experts"]["profiling"],
        t["top_k"]["profiling"],
    ]
    assert "one shared expert" in lines[1] and both("shared_experts") == ("1", "1")
    assert numbers(lines[2]) == [t["capacity_factor"]["reference"]] and lines[2].endswith("Same")
    assert numbers(lines[3]) == [
        x for w in ("reference", "profiling") for x in (t["sequence_tokens"][w], t["global_batch_tokens"][w])
    ]
    assert numbers(lines[4])[:4] == [
        x for w in ("reference", "profiling") for x in (t["total_params"][w], t["active_params"][w])
    ]
    prose = squeeze(report["appendix"])
    at = prose.index("Based on configuration-derived counts")
    prose = prose[at : prose.index("B.5 Captured")]
    for w in ("reference", "profiling"):
        assert f"{t['alpha_P'][w]}%" in prose and f"{t['capacity_to_active'][w]}×" in prose
        assert f"N/K={t['experts_per_active'][w]}" in prose
        assert f"{t['balanced_assignments_per_expert'][w]} Mi" in prose
    assert f"({t['rank_microbatch_tokens']['profiling']} tokens)" in prose
    assert "yields four accumulation microbatches on one eight-GPU node and one on the 32-GPU pool" in prose
    assert (t["accumulation_8_gpus"]["profiling"], t["accumulation_32_gpus"]["profiling"]) == ("4", "1")


def test_table_48_reads_as_the_report(report):
    lines = [line for line in body(report, 48).splitlines() if re.match(r"[\d,]+ [\d.]+×", line)]
    got = [[int(r["rows_M"]), *(r[c] for c in list(COLUMNS[48])[1:])] for r in printed_rows(48)]
    assert got == [[int(x.split()[0].replace(",", "")), *(c.rstrip("×") for c in x.split()[1:])] for x in lines]


def test_table_49_reads_as_the_report(report):
    rows = printed_rows(49)
    lines = rows_by_first_cell(body(report, 49), [r["configuration"] for r in rows])
    sizes: dict[str, tuple[str, ...]] = {}
    for row, line in zip(rows, lines):
        model = re.search(r"(\d+) layers; (\d+) routed experts; ([\d.]+[BT]) active, ([\d.]+[BT]) total", line)
        if model:
            sizes[row["model"]] = model.groups()
        else:
            assert "ame" in line and row["model"] in sizes, row["anchor"]
        assert (row["layers"], row["routed_experts"], row["active"], row["total"]) == sizes[row["model"]], row["anchor"]
        batch = re.search(
            r"GBS (\d+) Mi; rank microbatch ([\d,]+); (\d+) nodes, (\d+) B300s (\d+) / (\d+) / (\d+) / (\d+) (.*)", line
        )
        assert batch, line
        got = [x.replace(",", "") for x in batch.groups()[:8]]
        names = ("global_batch_Mi", "rank_microbatch_tokens", "nodes", "gpus", "dense_dp", "expert_dp", "ep", "pp")
        assert got == [row[n] for n in names], row["anchor"]
        path = batch.group(9)
        assert path.startswith(row["compute"]) and row["transport"] in path, row["anchor"]
        assert {"no": "no recompute", "per-layer": "per-layer recompute"}[row["recompute"]] in path, row["anchor"]


def test_table_50_reads_as_the_report(report):
    lines = [squeeze(x) for x in body(report, 50).splitlines()]
    lines = [x for x in lines if re.search(r" (Learned|Random) \d{3} ", x)]
    got = [f"{r['configuration']} {r['routing']} {r['TFLOPs_per_gpu']} {r['observation']}" for r in printed_rows(50)]
    assert got == lines


def test_units_and_quantity_names_are_known():
    units = {"nodes", "GPUs", "MiB", "version", "name", "links", "GB/s", "rails", "Gb/s", "state"}
    assert {r["unit"] for r in printed_rows(45)} == units
    units = {"blocks", "columns", "experts", "ratio", "tokens", "Mi", "B", "ranks", "%", "x", "microbatches"}
    assert {r["unit"] for r in printed_rows(47)} == units
    for number in (45, 47):
        names = [r["quantity"] for r in printed_rows(number)]
        assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z][A-Za-z0-9_]*", n) for n in names)


def test_table_50_uses_follow_the_observation():
    words = {
        "headline": "Headline",
        "companion": "companion",
        "repeat": "Repeat",
        "alternate": "Alternate",
        "unpaired": "no random-routing pair",
    }
    for row in printed_rows(50):
        assert words[row["use"]] in row["observation"].replace("Learned-routing companion", "companion"), row["anchor"]
        assert (row["use"] == "headline") == row["observation"].startswith("Headline")


def test_table_51_terms_are_in_their_row(report):
    rows = printed_rows(51)
    lines = rows_by_first_cell(body(report, 51), [r["metric"] for r in rows])
    for row, line in zip(rows, lines):
        assert [t for t in row["key_terms"].split("|") if t not in line] == [], row["anchor"]


@pytest.mark.parametrize(
    "text, unit, value, half",
    [
        ("24,576", "", 24576, 0.5),
        ("1.200T", "", 1.2e12, 5e8),
        ("26.688", "B", 26_688_000_000, 500_000),
        ("0.1875", "Mi", 0.1875 * 2**20, 0.00005 * 2**20),
        ("10.89", "%", 10.89, 0.005),
        ("2.02×", "", 2.02, 0.005),
        ("18 Mi", "", 18 * 2**20, 2**19),
    ],
)
def test_printed_numbers(text, unit, value, half):
    p = parse_printed(text, unit)
    assert p.value == value and p.half_unit == pytest.approx(half, rel=1e-12)


@pytest.mark.parametrize("text", ["", "abc", "1,23", "1.2.3", "10^9", "1e9", "590.48.01"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="printed number"):
        parse_printed(text)


@given(st.decimals(0, 10**6, places=3))
def test_a_number_agrees_with_its_own_print(x):
    p = parse_printed(f"{x:.3f}")
    assert p.agrees(float(x)) and p.interval[0] < x < p.interval[1]
    assert not p.agrees(float(x + Decimal("0.0006"))) and not p.agrees(float(x - Decimal("0.0006")))


@pytest.mark.parametrize(
    "content, message",
    [
        ("anchor,rows_M\nx,1\n", "expected columns"),
        (
            "anchor,rows_M,prequantized_eager,prequantized_graph,including_q_eager,including_q_graph\nT,1,2\n",
            "line 2: expected 6",
        ),
        (
            "anchor,rows_M,prequantized_eager,prequantized_graph,including_q_eager,including_q_graph\nT,x,1,1,1,1\n",
            "column rows_M: expected int, got 'x'",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path, monkeypatch, content, message):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "tab48.csv").write_text(content)
    monkeypatch.setattr(rt, "data_root", lambda: tmp_path)
    with pytest.raises(ValueError, match=message):
        report_table(48)


def test_an_exact_half_survives_binary_rounding():
    """0.5 is printed for 0.45 to 0.55; in binary 0.55 - 0.5 is above 0.05."""
    p = parse_printed("0.5")
    assert 0.55 - 0.5 > 0.05 and p.agrees(0.55) and not p.agrees(0.55 + 1e-9)
    big = parse_printed("26.688", "B")
    assert big.agrees(26_688_500_000) and not big.agrees(26_688_500_001)


def test_unknown_table_raises():
    with pytest.raises(KeyError, match="Table 99 is not transcribed"):
        report_table(99)
