"""Reading Kineto files: exact digits, damage, names from outside, sizes."""

from __future__ import annotations

import contextlib
import gzip
import json
import tracemalloc
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kineto_files import call, event, kernel, launch, text, write

from workbench.traces import TraceError, read, read_folder
from workbench.traces import kineto as module
from workbench.traces.build import Builder, link
from workbench.traces.digits import parse_us
from workbench.traces.trace import PYTHON, Calls, DeviceOps
from workbench.traces.verify import verify_trace

PAIR = [launch(0, 5_000, 1), kernel(8_000, 20_000, 1), launch(30_000, 35_000, 2), kernel(40_000, 47_000, 2)]


def gzip_of(content: bytes) -> bytes:
    """Compressed without the time of day: bytes of test parameters become names of tests."""
    return gzip.compress(content, mtime=0)


@given(
    st.lists(st.tuples(st.integers(0, 10**15 - 1), st.integers(0, 999), st.booleans(), st.integers(0, 3)), min_size=1)
)
def test_digits_are_exact(values):
    raws, expected = [], []
    for whole, fraction, negative, decimals in values:
        digits = f"{'-' if negative else ''}{whole}" + (f".{fraction:03d}"[: decimals + 1] if decimals else "")
        raws.append(digits.encode())
        expected.append(int(Decimal(digits) * 1000))
    assert parse_us(raws).tolist() == expected


@pytest.mark.parametrize(
    ("raw", "ns"),
    [
        (b"1712195495519680.047", 1712195495519680047),
        (b"1e3", 1_000_000),
        (b'"12.5"', 12_500),
        (b"0.0004", 0),
        (b"0.0006", 1),
        (b"1.5e-3", 2),
        (b"-0.001", -1),
        (b"1.2347", 1_235),
        (b"-7.00049", -7_000),
        (b"3999999999999999.999", 3_999_999_999_999_999_999),
        (b"4611686018427387.903", 2**62 - 1),
        (b"-4611686018427387.903", 1 - 2**62),
    ],
)
def test_numbers_in_other_forms(raw, ns):
    assert parse_us([b"1.0", raw, b"2"]).tolist() == [1000, ns, 2000]


@pytest.mark.parametrize(
    "raw",
    [
        b"-",
        b".",
        b"4611686018427387.904",
        b"-4611686018427387.904",
        b"10000000000000000",
        b"12345678901234567.5",
        b"9300000000000000.5",
        b"NaN",
        b"99999999999999999999",
        b"1e400",
        b'"x"',
        b"null",
        b"[1]",
        b"9" * 5000,
    ],
)
def test_unusable_numbers_are_marked_not_guessed(raw):
    assert parse_us([raw])[0] == np.iinfo(np.int64).min


def test_times_names_and_links(tmp_path):
    trace = read(write(tmp_path, PAIR))
    assert trace.ops.start_ns.tolist() == [8_000, 40_000]
    assert trace.ops.end_ns.tolist() == [20_000, 47_000]
    assert [trace.names[trace.calls.name[i]] for i in trace.ops.launch] == ["cudaLaunchKernel"] * 2
    assert trace.processes == [100] and trace.rank == 0 and trace.dropped == {}


def test_gz_and_blocks_give_the_same_columns(tmp_path, monkeypatch):
    events = [
        e
        for i in range(400)
        for e in (
            launch(i * 10_000, i * 10_000 + 3_000, i + 1),
            kernel(i * 10_000 + 4_001, i * 10_000 + 9_007, i + 1, name=f'k{{"{i}"}}, {{'),
        )
    ]
    plain = read(write(tmp_path, events))
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    for size in (300, 1_000, 4_096):
        monkeypatch.setattr(module, "BLOCK_BYTES", size)
        again = read(packed)
        for column in ("start_ns", "end_ns", "correlation", "launch"):
            assert (getattr(again.ops, column) == getattr(plain.ops, column)).all()
        assert len(again.ops) == 400 and again.dropped == {}


def test_top_level_list_and_old_categories(tmp_path):
    old = [dict(e, cat={"cuda_runtime": "Runtime", "kernel": "Kernel"}[e["cat"]]) for e in PAIR]
    body = text(old)
    path = tmp_path / "list.json"
    path.write_text("[" + body.split("[", 1)[1][:-1])
    trace = read(path)
    assert len(trace.ops) == 2 and len(trace.calls) == 2 and trace.dropped == {}


def test_metadata_after_the_events_is_read(tmp_path):
    path = tmp_path / "t.json"
    body = text(PAIR)[:-1]
    path.write_text(body + ', "traceName": "a]}", "INFO": ["x", {"y": [1]}]}')
    trace = read(path)
    assert trace.metadata["traceName"] == "a]}" and len(trace.ops) == 2 and trace.dropped == {}


def test_metadata_only(tmp_path):
    path = tmp_path / "m.json"
    path.write_text('{"schemaVersion": 1}')
    trace = read(path)
    assert len(trace.ops) == 0 and any("no traceEvents" in w for w in trace.warnings)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00\x01", b"{", b'{"traceEvents": 5}', b"\x1f\x8b broken"])
def test_what_is_no_trace_is_said(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    try:
        trace = read(path)
    except TraceError as error:
        assert "x.json" in str(error)
    else:
        assert len(trace.ops) == 0 and (trace.dropped or trace.warnings)


def test_absent_and_folder(tmp_path):
    with pytest.raises(TraceError, match="no such trace"):
        read(tmp_path / "absent.json")
    with pytest.raises(TraceError, match="folder"):
        read(tmp_path)
    with pytest.raises(TraceError, match="no trace files"):
        list(read_folder(tmp_path))


@pytest.mark.parametrize(
    "name", [rb"C:\Users\new\k", b"bell \x07 tab\x01", b"caf\xe9 \xff", rb"bad \x41 \q", rb"lone \ud800"]
)
def test_damaged_text_is_repaired_and_the_neighbours_survive(tmp_path, name):
    body = text([*PAIR, kernel(50_000, 60_000, 1, name="HOSTILE"), kernel(70_000, 80_000, 2)])
    path = tmp_path / "t.json"
    path.write_bytes(body.encode().replace(b"HOSTILE", name))
    trace = read(path)
    assert len(trace.ops) == 4
    assert trace.dropped.get("damaged_events", 0) == 0 and "truncated_file" not in trace.dropped


def test_nan_and_infinity_in_args(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(text(PAIR).replace('"device": 0', '"device": 0, "occupancy": nan, "x": -Infinity'))
    assert len(read(path).ops) == 2


@pytest.mark.parametrize("broken", ["NaN", "[NaN, 1]", '{"y": [-Infinity]}'])
def test_good_escapes_beside_what_is_no_json_keep_their_meaning(tmp_path, broken):
    path = tmp_path / "t.json"
    body = text([*PAIR, kernel(50_000, 60_000, 1, name="C:\\users\\q")])
    path.write_text(body.replace('"device": 0', f'"device": 0, "x": {broken}'))
    trace = read(path)
    assert len(trace.ops) == 3 and "C:\\users\\q" in trace.names and set(trace.dropped) <= {"repaired_events"}


def test_a_broken_event_is_dropped_alone_and_counted(tmp_path):
    path = tmp_path / "t.json"
    lines = text(PAIR).split("\n")
    lines.insert(3, '{"ph": "X", "cat": "kernel", "name": "bro"ken", "ts": },')
    path.write_text("\n".join(lines))
    trace = read(path)
    assert len(trace.ops) == 2 and trace.dropped == {"damaged_events": 1}


def test_truncation_anywhere_keeps_whole_events(tmp_path):
    body = text(PAIR).encode()
    path = tmp_path / "t.json"
    begin = body.index(b"[")
    for cut in range(begin + 1, len(body) - 2):
        path.write_bytes(body[:cut])
        trace = read(path)
        whole = body[:cut].count(b"},\n")
        assert len(trace.ops) + len(trace.calls) >= whole, cut
        assert trace.dropped.get("truncated_file") == 1, cut


def test_truncated_gzip(tmp_path):
    packed = gzip.compress(text([e for i in range(500) for e in PAIR]).encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed[: len(packed) - 20])
    trace = read(path)
    assert trace.dropped["truncated_file"] >= 1 and any("compressed" in w for w in trace.warnings)


def test_integers_beyond_int64_and_odd_ids(tmp_path):
    big = 2**64 + 5
    events = [
        *PAIR,
        launch(60_000, 61_000, big),
        kernel(62_000, 63_000, big),
        kernel(64_000, 65_000, "9", stream="0x7"),
    ]
    trace = read(write(tmp_path, events))
    assert len(trace.ops) == 4 and trace.dropped["out_of_range_ids"] == 2
    assert trace.ops.launch[2] == -1 and trace.ops.stream[3] == 7 and trace.ops.correlation[3] == 9


def test_unusable_times_are_counted(tmp_path):
    path = tmp_path / "t.json"
    body = text([*PAIR, kernel(50_000, 60_000, 9), kernel(61_000, 60_000, 9)])
    path.write_text(body.replace('"ts": 50.000', '"ts": 1e400'))
    trace = read(path)
    assert len(trace.ops) == 2 and trace.dropped == {"unusable_time": 1, "negative_duration": 1}


def test_zero_time_operation_is_dropped_and_counted(tmp_path):
    trace = read(write(tmp_path, [*PAIR, kernel(0, 0, 2)]))
    assert len(trace.ops) == 2 and trace.dropped == {"zero_time_ops": 1}


@pytest.mark.parametrize("correlation", [0, -1, None])
def test_no_correlation_links_nothing(tmp_path, correlation):
    trace = read(write(tmp_path, [launch(0, 1_000, correlation), kernel(2_000, 3_000, correlation)]))
    assert trace.ops.launch.tolist() == [-1]


def test_correlation_repeated_over_processes(tmp_path):
    events = [
        launch(0, 1_000, 1, pid=11),
        launch(0, 1_000, 1, pid=22),
        launch(2_000, 3_000, 2, pid=11),
        launch(5_000, 6_000, 3, pid=22),
        kernel(4_000, 5_000, 2, device=0),
        kernel(7_000, 8_000, 3, device=1),
        kernel(9_000, 9_500, 1, device=0),
        kernel(9_000, 9_500, 1, device=1),
    ]
    trace = read(write(tmp_path, events))
    owner = {
        (int(d), int(c)): trace.process_label(int(p))
        for p, d, c in zip(trace.ops.process, trace.ops.device, trace.ops.correlation)
    }
    assert owner == {(0, 2): 11, (1, 3): 22, (0, 1): 11, (1, 1): 22}


def test_a_correlation_used_twice_takes_the_launch_before_it(tmp_path):
    trace = read(
        write(
            tmp_path, [launch(0, 1_000, 5), kernel(1_500, 2_000, 5), launch(9_000, 9_500, 5), kernel(9_700, 9_900, 5)]
        )
    )
    assert trace.calls.start_ns[trace.ops.launch].tolist() == [0, 9_000] and trace.dropped == {"ambiguous_links": 2}


def test_ids_shared_by_calls_of_a_process_are_counted_as_guesses(tmp_path):
    same = [e for i in range(5) for e in (launch(i * 10_000, i * 10_000 + 5_000, 1),
                                          kernel(i * 10_000 + 6_000, i * 10_000 + 12_000, 1))]  # fmt: skip
    trace = read(write(tmp_path, same))
    assert trace.dropped == {"ambiguous_links": 5} and "guess" in trace.warnings[0]
    assert trace.calls.start_ns[trace.ops.launch].tolist() == [0, 10_000, 20_000, 30_000, 40_000]


def operations(start, process, device, correlation):
    """Device operations of no length."""
    builder = Builder("")
    builder.add(DeviceOps, start_ns=start, end_ns=start, process=process, device=device, correlation=correlation)
    return DeviceOps(**builder.chunks[DeviceOps][0])


CALLS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2), st.integers(-1, 5)), max_size=14)
OPS = st.lists(st.tuples(st.integers(0, 60), st.integers(-1, 2), st.integers(0, 1), st.integers(-1, 6)), max_size=10)


@settings(max_examples=200)
@given(CALLS, OPS)
@example([(0, 0, 1), (0, 0, 1), (0, 0, 2)], [(0, 2, 0, 1)])  # of a process that made no call
def test_links_agree_with_a_slow_search(call_rows, op_rows):
    start, process, ids = (
        (np.array(c, np.int64) for c in zip(*sorted(call_rows))) if call_rows else [np.empty(0, int)] * 3
    )
    zeros = np.zeros(len(start), np.int32)
    calls = Calls(start, start + 1, zeros, zeros, process.astype(np.int32), zeros, ids)
    rows = sorted(op_rows)
    columns = (np.array(c, np.int64) for c in zip(*rows)) if rows else [np.empty(0, np.int64)] * 4
    found, guessed = link(operations(*columns), calls)

    def candidates(row):
        _, own, _, wanted = row
        return [j for j in range(len(ids)) if wanted > 0 and ids[j] == wanted and own in (-1, process[j])]

    unique = [(row, c[0]) for row in rows if len(c := candidates(row)) == 1 and list(ids).count(row[3]) == 1]
    expected_guesses = 0
    for i, (at, own, device, wanted) in enumerate(rows):
        chosen = candidates(rows[i])
        if own < 0 and list(ids).count(wanted) > 1:
            owners = [int(process[c]) for row, c in unique if row[2] == device]
            home = int(np.bincount(owners).argmax()) if owners else -1
            chosen = [j for j in chosen if process[j] == home] or chosen
        expected_guesses += len(chosen) > 1
        before = [int(start[j]) for j in chosen if start[j] <= at]
        launch_row = int(found.launch[i])
        if not chosen:
            assert launch_row == -1
        else:
            assert launch_row in chosen and start[launch_row] == (max(before) if before else start[chosen[0]])
    assert guessed == expected_guesses


def test_one_id_for_everything_stays_linear():
    # In the square of the number it would outlast the limit of every test.
    n = 200_000
    start, zeros = np.arange(n) * 10, np.zeros(n, np.int32)
    calls = Calls(start, start + 1, zeros, zeros, zeros, zeros, np.ones(n, np.int64))
    ops = operations(start + 5, zeros - 1, zeros, np.ones(n, np.int64))
    found, guessed = link(ops, calls)
    assert guessed == n and (found.launch == np.arange(n)).all()


STRAYS = {"5": 1, '"x"': 1, "null": 1, "true": 1, "-1.5e3": 1, '[1, {"a": 2}]': 1, '{"name": "no phase"}': 1,
          '5, "x", null, [1, [2]]': 4, "{}": 0}  # fmt: skip


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("stray", STRAYS)
def test_items_that_are_no_events_are_counted(tmp_path, stray, place):
    body = text(PAIR, traceName="kept")
    at = {"first": body.index('{"ph"'), "middle": body.index("},\n{") + 3, "last": body.rindex("\n]}")}[place]
    path = tmp_path / "t.json"
    path.write_text(body[:at] + (f",\n{stray}" if place == "last" else f"{stray},\n") + body[at:])
    trace = read(path)
    assert len(trace.ops) == 2 and len(trace.calls) == 2 and trace.metadata["traceName"] == "kept"
    assert trace.dropped == ({"stray_items": STRAYS[stray]} if STRAYS[stray] else {})
    assert verify_trace(trace).exit_code == (2 if STRAYS[stray] else 0)


def test_nothing_but_strays(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [1, 2, "x", null], "traceName": "kept"}')
    trace = read(path)
    assert trace.dropped == {"stray_items": 4} and trace.metadata == {"traceName": "kept"}


@pytest.mark.parametrize("block", [200, 512 << 10])
@pytest.mark.parametrize("join", ["{a}\n{a}", '{a}{{"traceEvents": []}}', '{b}, "traceEvents": [{{"ph": "X"}}]}}'])
def test_a_second_list_of_events_is_counted(tmp_path, monkeypatch, join, block):
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    path = tmp_path / "t.json"
    path.write_text(join.format(a=text(PAIR), b=text(PAIR)[:-1]))
    trace = read(path)
    assert trace.dropped["second_document"] >= 1 and any("more than one list" in w for w in trace.warnings)
    assert verify_trace(trace).exit_code == 2


def test_text_after_the_document_is_said(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(text(PAIR) + "\nsome text")
    assert read(path).warnings == ["text after the end of the JSON document is ignored"]
    path.write_text(text(PAIR) + "\0" * 1_000)
    assert read(path).warnings == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (text(PAIR).encode("utf-16"), "UTF-16"),
        (gzip_of(gzip_of(text(PAIR).encode())), "compressed twice"),
        (gzip_of(b""), "nothing in it"),
        (gzip_of(text(PAIR).encode())[:5], "compressed stream is damaged"),
        (b"PK\x03\x04" + bytes(50), "zip archive"),
        (b"\x28\xb5\x2f\xfd" + bytes(50), "zstd"),
        (b"\x80\x04\x95" + bytes(50), "pickle"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b'{"ph": "X", "name": "a"}\n{"ph": "X", "name": "b"}\n', "one event per line"),
    ],
)
def test_other_formats_are_named(tmp_path, content, part):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=part):
        read(path)


@pytest.mark.parametrize(
    "packed",
    [
        lambda b: gzip.compress(b[:400]) + gzip.compress(b[400:]),
        lambda b: gzip.compress(b"") + gzip.compress(b) + gzip.compress(b""),
        lambda b: gzip.compress(b) + bytes(64),
        lambda b: b"\xef\xbb\xbf" + b,
        lambda b: b.replace(b"\n", b"\r\n"),
        lambda b: b.replace(b'"ph": "X"', b'"ph": "M", "ph": "X"'),
        lambda b: b.replace(b'"ts": 8.000', b'"ts": "8.000"'),
        lambda b: b.replace(b'"ts": 8.000', b'"ts": 99.0, "ts": 8'),
        lambda b: b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b", " + b[1:],
        lambda b: b'{"note": "\\"traceEvents\\": [", ' + b[1:],
        lambda b: b.replace(b"},\n{", b"}\n{"),
        lambda b: b[:-3] + b",\n]}",
    ],
)
def test_odd_but_whole_files_are_read_whole(tmp_path, packed):
    path = tmp_path / "t.json"
    path.write_bytes(packed(text(PAIR).encode()))
    trace = read(path)
    assert trace.ops.start_ns.tolist() == [8_000, 40_000] and trace.dropped == {} and trace.rank in (0, None)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"ts": 8.000', '"ts": NaN', "unusable_time"),
        ('"dur": 12.000', '"dur": Infinity', "unusable_time"),
        ('"ts": 8.000', '"ts": [8]', "unusable_time"),
        ('"ts": 8.000', '"ts": 9223372036854775.807', "unusable_time"),
        ('"dur": 12.000', '"dur": 4611686018427387.904', "unusable_time"),
        ('"dur": 12.000', f'"dur": {"1" * 100_000}', "unusable_time"),
        ('"ts": 8.000', '"ts": 1e999999999', "unusable_time"),
        ('"dur": 12.000', '"dur": -12.000', "negative_duration"),
        ('"args": {"correlation": 1}', '"args": [1]', "damaged_events"),
        ('"pid": 100', '"pid": {"a": 1}', "damaged_events"),
        ('"name": "kernel"', '"name": ["a"]', "damaged_events"),
    ],
)
def test_unusable_fields_cost_their_event_alone(tmp_path, old, new, reason):
    body = text(PAIR)
    path = tmp_path / "t.json"
    path.write_text(body.replace(old, new, 1))
    trace = read(path)
    assert trace.dropped[reason] == 1 and len(trace.ops) + len(trace.calls) == 3
    assert verify_trace(trace).exit_code == 2


def test_a_damaged_stream_is_counted_once(tmp_path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text(PAIR).encode()) + b"garbage")
    trace = read(path)
    assert len(trace.ops) == 2 and trace.dropped == {"truncated_file": 1}


def _uncategorised():
    return [{k: v for k, v in e.items() if k != "cat"} for e in PAIR]


@pytest.mark.parametrize(
    ("events", "part"),
    [
        ([event("cpu_op", "aten::mm", 0, 5_000)], "without ProfilerActivity.CUDA"),
        (_uncategorised(), "none of its 4 complete events has a category"),
        ([dict(e, cat="tensorflow") for e in PAIR], "found: tensorflow"),
        ([], "no device operations in this trace"),
    ],
)
def test_why_there_is_no_device_work_is_said(tmp_path, events, part):
    trace = read(write(tmp_path, events))
    assert any(part in w for w in trace.warnings) and part in verify_trace(trace).reasons[-1]


def test_rocm_names_and_default_stream(tmp_path):
    events = [
        call("hipLaunchKernel", 0, 1_000, 1, stream="0x0"),
        kernel(2_000, 3_000, 1, stream=0, device=2),
        call("hipMemcpyWithStream", 4_000, 9_000, 2),
        event(
            "gpu_memcpy",
            "Memcpy DtoH (Device -> Host)",
            5_000,
            8_000,
            pid=2,
            tid=0,
            correlation=2,
            stream=0,
            device=2,
            kind="DtoH",
        ),
    ]
    trace = read(write(tmp_path, events))
    assert (trace.ops.launch >= 0).all() and trace.ops.stream.tolist() == [0, 0] and trace.devices() == [(0, 2)]


def test_ranks_of_a_folder(tmp_path):
    for rank in (0, 1):
        write(tmp_path, PAIR, f"rank{rank}.json", distributedInfo={"rank": rank})
    write(tmp_path, PAIR, "rank2.json", distributedInfo=None)
    assert [t.rank for t in read_folder(tmp_path)] == [0, 1, None]


def test_python_frames_of_millions_of_names_are_interned(tmp_path):
    frames = [event("python_function", "train.py(3): step", i, i + 1) for i in range(1, 300)]
    trace = read(write(tmp_path, [*PAIR, *frames]))
    assert (trace.spans.kind == PYTHON).sum() == 299 and len(trace.names) < 10


@settings(max_examples=60)
@given(st.data())
def test_flipped_bytes_never_hang_or_crash(tmp_path_factory, data):
    body = bytearray(_FUZZ)
    for _ in range(data.draw(st.integers(1, 12))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(bytes(body))
    try:
        trace = read(path)
    except TraceError:
        return
    assert len(trace.ops) <= 2 * 40 + 20
    from workbench.traces.summary import summarise

    json.dumps(summarise(trace), allow_nan=False)
    verify_trace(trace)


_FUZZ = text(
    [
        e
        for i in range(20)
        for e in (launch(i * 9_000, i * 9_000 + 2_000, i + 1), kernel(i * 9_000 + 3_000, i * 9_000 + 8_000, i + 1))
    ]
).encode()


def test_hostile_nesting_and_repetition_stay_linear(tmp_path):
    path = tmp_path / "t.json"
    for hostile in ("[" * 200_000, '{"a":' * 100_000, '{"ph": "X", ' * 50_000, '"' * 300_001, "\\" * 300_000):
        path.write_text('{"traceEvents": [' + hostile)
        with contextlib.suppress(TraceError):
            read(path)  # in the square of its length it would outlast the limit of every test


def test_memory_is_bounded_by_columns_and_a_block(tmp_path, monkeypatch):
    path = tmp_path / "big.json"
    with path.open("w") as f:
        f.write('{"traceEvents": [\n')
        for i in range(60_000):
            for e in (
                launch(i * 100, i * 100 + 50, i + 1),
                kernel(i * 100 + 60, i * 100 + 99, i + 1, name=f"k{i % 50}" + "x" * 200),
            ):
                f.write(json.dumps(e) + ",\n")
        f.write('{"ph": "M", "name": "end"}]}')
    monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 20)
    tracemalloc.start()
    trace = read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(trace.ops) == 60_000
    columns = 60_000 * (74 + 37)
    assert path.stat().st_size > 29e6
    assert peak < 3 * columns + 12e6  # chunks, joined and sorted, and the structs of a block of 1 MiB; never the file
