"""Files written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.core.files import WRITING, new_folder, replace_file, replacing


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(("content", "expected"), [("é\n", b"\xc3\xa9\n"), (b"\x00\xff", b"\x00\xff"), ("", b"")])
def test_new_and_replaced_files_hold_the_content_and_nothing_lies_beside_them(tmp_path, content, expected):
    for before in (None, b"a longer content from before"):
        path = tmp_path / "a.json"
        if before is not None:
            path.write_bytes(before)
        replace_file(str(path), content)
        assert path.read_bytes() == expected and names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with pytest.raises(type(error)), replacing(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old" and names(tmp_path) == ["a.csv"]


def test_a_failed_rename_leaves_no_other_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "folder", "x")
    assert names(tmp_path) == ["folder"]


def test_a_block_that_wrote_nothing_is_an_error_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_two_writers_of_one_file_do_not_write_into_each_other(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as first, replacing(path) as second:
        assert first != second and first.parent == second.parent == tmp_path
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first" and names(tmp_path) == ["a.json"]


def test_the_temporary_name_is_hidden_and_ends_as_asked(tmp_path):
    for ending in (".tmp", ".json.gz"):
        with replacing(tmp_path / "trace.json.gz", ending) as temporary:
            assert temporary.name.startswith(".trace.json.gz.") and temporary.name.endswith(ending)
            temporary.touch()
    with replacing(tmp_path / "trace.json.gz") as temporary:
        assert not temporary.name.endswith(".gz")
        temporary.touch()


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_permissions_are_those_of_the_file_before_else_the_usual_ones(tmp_path):
    usual, kept = tmp_path / "usual", tmp_path / "kept"
    (tmp_path / "plain").write_text("")
    kept.write_text("")
    kept.chmod(0o640)
    for path in (usual, kept):
        replace_file(path, "x")
    assert usual.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert kept.stat().st_mode & 0o777 == 0o640


def test_a_folder_appears_whole(tmp_path):
    (tmp_path / "plain").mkdir()
    with new_folder(tmp_path / "made") as folder:
        assert folder.parent == tmp_path and folder.name.startswith(WRITING) and WRITING.startswith(".")
        (folder / "a").write_text("x")
        assert not (tmp_path / "made").exists()
    assert names(tmp_path) == ["made", "plain"] and (tmp_path / "made" / "a").read_text() == "x"
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_folder_whose_making_fails_goes_with_all_that_it_holds(tmp_path, error):
    with pytest.raises(type(error)), new_folder(tmp_path / "made") as folder:
        (folder / "a").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_a_full_folder_is_not_replaced(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "old").write_text("x")
    with pytest.raises(OSError), new_folder(tmp_path / "made") as folder:
        (folder / "new").write_text("y")
    assert names(tmp_path) == ["made"] and names(tmp_path / "made") == ["old"]


def test_it_needs_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules); import workbench.core.files\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['workbench']"
