"""Writing a recording, and every way in which the check must refuse one."""

from __future__ import annotations

import dataclasses
import json
import shutil
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

import workbench.core.record as record
from workbench.cli import app
from workbench.core.params import Params, param
from workbench.core.record import (
    FIELDS,
    GROUPS,
    RecordChangedError,
    Recorder,
    check_recording,
    load_recording,
    record_digest,
)
from workbench.suite.record_check import check_all


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A good recording, written once."""
    root = tmp_path_factory.mktemp("data") / "recorded"
    patch = pytest.MonkeyPatch()
    patch.setenv("WORKBENCH_COMMIT", "0123456789abcdef0123456789abcdef01234567")
    recorder = Recorder("tab48_submission_tax", {"seed": 7, "rows": 128}, command="workbench record run tab48")
    recorder.row(rows=128, median_us=3.5)
    recorder.row(rows=4096, median_us=9.5, note="a,b")
    recorder.samples("128", [3.0, 3.5, 4.0])
    recorder.attach("log.txt", "started in /home/someone/project/run on 10.1.2.3\n")
    recorder.set("protocol", timer="cuda events", warmup=3, repeats=5)
    path = recorder.write(root)
    patch.undo()
    return path


@pytest.fixture
def copy(made, tmp_path) -> Path:
    """A copy to break."""
    target = tmp_path / "recorded" / made.parent.name / made.name
    shutil.copytree(made, target)
    return target


def edit(path: Path, change, seal: bool = True) -> None:
    """Change a record; sealed, its digest fits again, so that each other defect shows alone."""
    found = json.loads((path / "record.json").read_text())
    change(found)
    if seal:
        found["digest"] = record_digest(found)
    (path / "record.json").write_text(json.dumps(found))


def test_a_written_recording_passes_and_is_whole(made):
    assert check_recording(made) == []
    found = json.loads((made / "record.json").read_text())
    assert [g for g in found if g in GROUPS] == list(GROUPS)
    for group in GROUPS:
        assert set(FIELDS[group]) <= set(found[group]), group
    assert found["workload"]["seeds"] == [7] and found["workload"]["params"] == {"seed": 7, "rows": 128}
    assert made.name.endswith("_0123456") and found["provenance"]["dirty"] is False
    assert sorted(p.name for p in made.iterdir()) == ["log.txt", "record.json", "samples.json", "table.csv"]


def test_text_attachments_are_scrubbed(made):
    text = (made / "log.txt").read_text()
    assert "someone" not in text and "10.1.2.3" not in text and text.startswith("started in <path>")


def test_json_attachments_stay_json(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "environment", lambda: {"gpu": None, "gpus": [], "at_start": {}})
    recorder = Recorder("x", {})
    recorder.row(a=1)
    events = {"file": "/home/someone/y\n@c.d", "url": 'http://h/"', "dur": [1.5, None]}
    recorder.attach("trace.json", json.dumps(events))
    kept = json.loads((recorder.write(tmp_path) / "trace.json").read_text())
    assert set(kept) == set(events) and kept["dur"] == [1.5, None] and "someone" not in json.dumps(kept)
    with pytest.raises(ValueError):
        recorder.attach("bad.json", "{")


def test_rows_come_back_typed(made, monkeypatch):
    monkeypatch.setenv("WORKBENCH_DATA", str(made.parent.parent.parent))
    rows = load_recording("tab48_submission_tax", made.name).tables()["table"]
    assert rows["median_us"].to_list() == [3.5, 9.5] and rows["note"].to_list() == [None, "a,b"]
    with pytest.raises(FileNotFoundError, match=made.name):
        load_recording("tab48_submission_tax", "2026-01-01_h200_fffffff")


def drop(group, name):
    return lambda r: r[group].pop(name)


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda r: r.update(schema=99), "schema: expected 1, got 99"),
        (lambda r: r.update(slug="other"), "slug: expected the folder's 'tab48_submission_tax'"),
        (lambda r: r.pop("protocol"), "protocol: expected an object"),
        (drop("protocol", "timer"), "protocol.timer: expected a value"),
        (drop("environment", "software"), "environment.software: expected a value"),
        (lambda r: r["provenance"].update(commit=None), "provenance.commit: expected a value"),
        (lambda r: r["provenance"].update(commit="f" * 40), "says '0123456', the record 'fffffff'"),
        (lambda r: r["provenance"].update(dirty=True), "provenance.dirty: the folder's name says False"),
        (lambda r: r["provenance"].update(date="2020-01-01T00:00"), "provenance.date"),
        (lambda r: r["raw_outputs"].update(files=[]), "raw_outputs.files: expected an object"),
        (lambda r: r["raw_outputs"]["files"].pop("table.csv"), "table.csv is not listed"),
        (lambda r: r["raw_outputs"]["files"]["log.txt"].update(sha256="0" * 64), "log.txt: its SHA-256"),
        (lambda r: r["raw_outputs"]["files"]["log.txt"].update(bytes=1), "log.txt: expected 1 bytes"),
        (lambda r: r["raw_outputs"]["files"].update(gone={}), "gone is missing"),
        (lambda r: r["workload"].update(mixers="/home/x/mixers"), "workload.mixers holds what looks like a path"),
        (lambda r: r["environment"].update(nics=["192.168.7.9"]), "environment.nics[0] holds what looks like a IPv4"),
    ],
)
def test_each_defect_is_named(copy, change, expected):
    edit(copy, change)
    problems = check_recording(copy)
    assert any(expected in p for p in problems), problems
    assert not any("digest" in p for p in problems)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["workload"]["params"].update(rows=129),
        lambda r: r["protocol"].pop("warmup"),
        lambda r: r.update(note="added"),
        lambda r: r["raw_outputs"]["files"]["table.csv"].update(sha256="0" * 64),
        lambda r: r.update(digest="0" * 64),
        lambda r: r.update(digest=None),
    ],
    ids=["value", "field dropped", "field added", "file's digest", "digest", "digest null"],
)
def test_a_hand_edited_record_is_named(copy, monkeypatch, change):
    monkeypatch.setenv("WORKBENCH_DATA", str(copy.parent.parent.parent))
    assert load_recording("tab48_submission_tax", copy.name).record["workload"]["params"]["rows"] == 128
    edit(copy, change, seal=False)
    assert any("expected the digest of its content" in p for p in check_recording(copy))
    with pytest.raises(RecordChangedError, match=f"tab48_submission_tax/{copy.name}: record.json: expected the digest"):
        load_recording("tab48_submission_tax", copy.name)


def test_a_raw_output_that_was_edited_is_not_shown(copy, monkeypatch):
    monkeypatch.setenv("WORKBENCH_DATA", str(copy.parent.parent.parent))
    recording = load_recording("tab48_submission_tax", copy.name)
    assert recording.tables()["table"].height
    table = copy / "table.csv"
    table.write_text(table.read_text().replace("1", "2", 1))
    with pytest.raises(RecordChangedError, match=r"the SHA-256 of table.csv is not the recorded one"):
        recording.tables()


@pytest.mark.parametrize(("text", "words"), [("{", "expected JSON"), ("[]", "expected an object, got list")])
def test_a_record_that_is_no_object_is_named(copy, monkeypatch, text, words):
    monkeypatch.setenv("WORKBENCH_DATA", str(copy.parent.parent.parent))
    (copy / "record.json").write_text(text)
    with pytest.raises(RecordChangedError, match=f"{copy.name}: record.json: {words}"):
        load_recording("tab48_submission_tax", copy.name)


def test_a_folder_or_a_loop_in_the_place_of_a_file_is_named(copy):
    table = copy / "table.csv"
    table.unlink()
    table.mkdir()
    assert any(p.startswith("table.csv: cannot be read: Is a directory") for p in check_recording(copy))
    table.rmdir()
    table.symlink_to(table.name)
    assert any(p.startswith("table.csv: cannot be read") for p in check_recording(copy))


def test_a_record_without_digest_is_read_but_not_passed(copy, monkeypatch):
    monkeypatch.setenv("WORKBENCH_DATA", str(copy.parent.parent.parent))
    edit(copy, lambda r: r.pop("digest"), seal=False)
    assert load_recording("tab48_submission_tax", copy.name).name == copy.name
    assert [p for p in check_recording(copy) if "digest" in p and p.endswith("got None")] == check_recording(copy)
    assert check_recording(copy)


def test_the_digest_covers_values_not_layout(copy):
    found = json.loads((copy / "record.json").read_text())
    (copy / "record.json").write_text(json.dumps(dict(reversed(found.items())), indent=4))
    assert check_recording(copy) == []


def test_what_json_turns_into_text_keeps_its_digest(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "environment", lambda: {"gpu": None, "gpus": [], "at_start": {}})
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    recorder = Recorder("x", {"by_rank": {10: 1.5, 9: 0.1}, "folder": Path("data"), "sizes": (1, 2)})
    recorder.row(a=1)
    name = recorder.write().name
    assert load_recording("x", name).record["workload"]["params"]["by_rank"] == {"10": 1.5, "9": 0.1}


def test_changed_and_unlisted_files_are_found(copy):
    (copy / "table.csv").write_text((copy / "table.csv").read_text().replace("3.5", "2.5"))
    (copy / "extra.bin").write_bytes(b"x")
    assert check_recording(copy) == [
        "extra.bin is not listed in raw_outputs.files",
        "table.csv: its SHA-256 is not the recorded one",
    ]


@pytest.mark.parametrize(
    "text, expected",
    [("{", "expected JSON"), ('{"a": NaN}', "NaN is not JSON"), ("[]", "got list"), ("[" * 100_000, "expected JSON")],
    ids=["cut", "NaN", "list", "deep"],
)
def test_unreadable_records(copy, text, expected):
    (copy / "record.json").write_text(text)
    assert expected in check_recording(copy)[0]
    (copy / "record.json").unlink()
    assert check_recording(copy) == ["record.json is missing"]


def test_folder_name_is_checked(copy):
    other = copy.with_name("latest")
    copy.rename(other)
    assert "expected <date>_<gpu>_<sha7>, got 'latest'" in check_recording(other)[0]


@pytest.mark.parametrize("case", ["present", "absent", "dirty"])
def test_pins(copy, monkeypatch, case):
    name = copy.name
    if case == "absent":
        name = "2026-01-01_h200_fffffff"
    if case == "dirty":
        name = f"{copy.name}-dirty"
        copy = copy.rename(copy.with_name(name))
        edit(copy, lambda r: r["provenance"].update(dirty=True))
    monkeypatch.setattr("workbench.experiments.slugs", lambda: ["tab48_submission_tax"])
    monkeypatch.setattr("workbench.experiments.load", lambda slug: type("E", (), {"recording": name}))
    problems = check_all(copy.parent.parent)[f"tab48_submission_tax/{name}"]
    expected = {"present": [], "absent": ["but not present"], "dirty": ["made from a changed tree"]}[case]
    assert len(problems) == len(expected) and all(e in p for e, p in zip(expected, problems))


def test_broken_experiment_is_named(copy, monkeypatch):
    def broken(slug):
        raise SyntaxError("no")

    monkeypatch.setattr("workbench.experiments.slugs", lambda: ["tab48_submission_tax"])
    monkeypatch.setattr("workbench.experiments.load", broken)
    assert "SyntaxError: no" in check_all(copy.parent.parent)["tab48_submission_tax"][0]


def test_recordings_are_never_overwritten(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_COMMIT", "a" * 40)
    monkeypatch.setattr(record, "environment", lambda: {"gpu": None, "gpus": [], "at_start": {}})
    recorder = Recorder("x", {})
    recorder.row(a=1)
    first, second = recorder.write(tmp_path), recorder.write(tmp_path)
    assert first != second and second.name.startswith(first.name)
    with pytest.raises(FileExistsError, match="never overwritten"):
        recorder.write(tmp_path)


def test_a_failed_write_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "environment", lambda: {"gpu": None, "gpus": [], "at_start": {}})
    recorder = Recorder("x", {"bad": float("nan")})
    with pytest.raises(ValueError, match="empty"):
        recorder.write(tmp_path)
    recorder.row(a=1)
    with pytest.raises(ValueError, match="JSON"):
        recorder.write(tmp_path)
    assert list((tmp_path / "x").iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "record.json", "", "a/b", ".hidden"])
def test_bad_attachment_names_raise(monkeypatch, name):
    monkeypatch.setattr(record, "environment", dict)
    with pytest.raises(ValueError, match="attachment name"):
        Recorder("x", {}).attach(name, b"")


def test_default_place_is_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    monkeypatch.setattr(record, "environment", lambda: {"gpu": None, "gpus": [], "at_start": {}})
    recorder = Recorder("x", {})
    recorder.row(a=1)
    assert recorder.write().parent == tmp_path / "recorded" / "x"


def test_dirty_trees_are_marked(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_COMMIT", "a" * 40)
    monkeypatch.setenv("WORKBENCH_DIRTY", "1")
    monkeypatch.setattr(record, "environment", lambda: {"gpu": "NVIDIA H200", "gpus": [], "at_start": {}})
    recorder = Recorder("x", {})
    recorder.row(a=1)
    assert recorder.write(tmp_path).name.endswith("_h200_aaaaaaa-dirty")


def measuring(rows_by_return: bool):
    """An experiment that measures nothing, and reports its rows one way or the other."""

    def measure(params, recorder):
        recorder.set("protocol", timer="none", warmup=0, repeats=1)
        if rows_by_return:
            return [{"seed": params.seed}]
        recorder.row(seed=params.seed)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Made(Params):
        seed: int = param(1, "seed")

    return types.SimpleNamespace(params=Made, measure=measure, choose=lambda source: source, tests=("tests/a.py",))


@pytest.fixture
def ran(monkeypatch) -> list:
    """Commands that would have run, which succeed."""
    commands = []
    monkeypatch.setattr(
        "workbench.cli.record.subprocess.run",
        lambda command, **_: commands.append(command) or types.SimpleNamespace(returncode=len(commands) - 1),
    )
    return commands


def test_nothing_is_recorded_while_its_tests_are_red(monkeypatch, tmp_path, ran):
    monkeypatch.setattr("workbench.experiments.load", lambda slug: measuring(True))
    ran.append("one before: the next status is 1")
    done = CliRunner().invoke(app, ["record", "run", "made_up", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "while its tests are red: tests/a.py" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("rows_by_return", [True, False])
def test_command_writes_one_recording_with_its_parameters(monkeypatch, tmp_path, ran, rows_by_return):
    monkeypatch.setenv("WORKBENCH_COMMIT", "a" * 40)
    monkeypatch.setattr("workbench.experiments.load", lambda slug: measuring(rows_by_return))
    done = CliRunner().invoke(app, ["record", "run", "made_up", "-p", "seed=5", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert ran[0][-1] == "tests/a.py"
    path = tmp_path / "made_up" / done.stdout.strip()
    assert check_recording(path) == []
    assert (path / "table.csv").read_text() == "seed\n5\n"
    assert json.loads((path / "record.json").read_text())["workload"]["seeds"] == [5]


@pytest.mark.parametrize("arguments", [["-p", "seed"], ["-p", "seed=x"], ["-p", "sed=1"]])
def test_command_refuses_bad_parameters(monkeypatch, tmp_path, arguments):
    monkeypatch.setattr("workbench.experiments.load", lambda slug: measuring(True))
    done = CliRunner().invoke(app, ["record", "run", "made_up", *arguments, "--out", str(tmp_path)])
    assert done.exit_code == 2 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("slug", "said"),
    [
        ("op_dispatch", "needs one CUDA GPU; no CUDA GPU is visible"),
        ("op_dispach", "no experiment 'op_dispach'"),
        ("fig30_submission_headroom", "has no source 'live'"),
    ],
)
def test_command_refuses_what_it_cannot_measure_before_it_does_anything(monkeypatch, tmp_path, slug, said):
    monkeypatch.setattr("workbench.core.experiment.gpu_present", lambda: False)
    done = CliRunner().invoke(app, ["record", "run", slug, "--out", str(tmp_path)])
    assert done.exit_code == 2 and said in done.stderr and list(tmp_path.iterdir()) == []


def test_every_recording_of_the_project_passes():
    """What continuous integration asks of ``data/recorded``."""
    assert {k: v for k, v in check_all().items() if v} == {}


@pytest.mark.parametrize("broken, code", [(False, 0), (True, 1)])
def test_command(copy, monkeypatch, broken, code):
    monkeypatch.setattr("workbench.experiments.slugs", list)
    if broken:
        (copy / "log.txt").write_text("changed")
    done = CliRunner().invoke(app, ["record", "check", "--root", str(copy.parent.parent)])
    assert done.exit_code == code, done.output
    assert ("FAIL" in done.output) == broken and f"1 recordings, {code} with problems" in done.output
    as_json = CliRunner().invoke(app, ["record", "check", "--json", "--root", str(copy.parent.parent)])
    assert bool(json.loads(as_json.output)[f"tab48_submission_tax/{copy.name}"]) == broken
    assert CliRunner().invoke(app, ["record", "check", "--root", str(copy / "absent")]).exit_code == 2


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"{}", b'{"provenance": null}', None])
def test_a_pinned_recording_that_cannot_be_read_is_a_line_not_an_exception(copy, monkeypatch, content):
    if content is None:
        (copy / "record.json").unlink()
    else:
        (copy / "record.json").write_bytes(content)
    monkeypatch.setattr("workbench.experiments.slugs", lambda: [copy.parent.name])
    monkeypatch.setattr("workbench.experiments.load", lambda slug: types.SimpleNamespace(recording=copy.name))
    found = check_all(copy.parent.parent)
    assert found == {f"{copy.parent.name}/{copy.name}": check_recording(copy)} and all(found.values())
