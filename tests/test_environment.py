"""environment.yml installs what pyproject.toml asks for, and the built wheel works without the checkout."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def merged(requirements: list[str]) -> dict[str, SpecifierSet]:
    """Return name to the conjunction of its specifiers."""
    found: dict[str, SpecifierSet] = {}
    for text in requirements:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def conda() -> dict:
    """Return environment.yml."""
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def pip_lines() -> list[str]:
    """Return the pip section of environment.yml."""
    return next(d["pip"] for d in conda()["dependencies"] if isinstance(d, dict))


def test_environment_agrees_with_pyproject() -> None:
    lines = pip_lines()
    options = [line for line in lines if line.startswith("-")]
    assert options == ["--constraint constraints.txt", "-e ."] and lines[-1] == "-e ."
    wanted = merged([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
    written = merged([line for line in lines if not line.startswith("-")])
    assert written.keys() == wanted.keys()
    for name, specifier in written.items():
        mine, theirs = ({str(s) for s in v} for v in (specifier, wanted[name]))
        assert mine <= theirs and mine, f"{name}: environment.yml has {mine}, pyproject.toml {theirs}"


def test_conda_python_is_one_that_pyproject_allows() -> None:
    plain = [d for d in conda()["dependencies"] if isinstance(d, str)]
    assert plain[-1] == "pip" and conda()["channels"] == ["conda-forge", "nodefaults"]
    version = next(d.removeprefix("python=") for d in plain if d.startswith("python="))
    assert version + ".0" in SpecifierSet(PROJECT["requires-python"])


def test_constraints_lie_within_the_ranges() -> None:
    wanted = merged([*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())])
    lines = [s for s in (ROOT / "constraints.txt").read_text().splitlines() if s and not s.startswith("#")]
    assert len(lines) >= 5
    for line in lines:
        match = re.fullmatch(r"([\w.-]+)==([\w.+-]+)", line)
        assert match, f"constraints pin exact versions: {line}"
        name = canonicalize_name(match[1])
        assert match[2] in wanted.get(name, SpecifierSet()), f"{line} lies outside {wanted.get(name)}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return next(out.glob("*.whl"))


def test_wheel_holds_code_scripts_notebooks_and_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {n.split("/")[0] for n in names if ".dist-info" not in n}
    assert tops == {"workbench", "moe_kernels"}, "a top-level `kernels` would shadow another package"
    for folder, pattern, target in [
        ("workbench", "*.py", "workbench"),
        ("workbench", "*.js", "workbench"),
        ("workbench", "*.j2", "workbench"),
        ("workbench", "*.css", "workbench"),
        ("kernels/moe_kernels", "*.py", "moe_kernels"),
        ("kernels/moe_kernels", "*.cu", "moe_kernels"),
        ("notebooks", "*.ipynb", "workbench/_bundled/notebooks"),
        ("data", "record.json", "workbench/_bundled/data"),
    ]:
        base = ROOT / folder
        ours = {f"{target}/{p.relative_to(base)}" for p in base.rglob(pattern) if ".ipynb_checkpoints" not in p.parts}
        assert ours <= names, f"missing in the wheel: {sorted(ours - names)[:5]}"
        assert ours or pattern in ("*.css", "*.cu"), f"no {pattern} in {folder}"


def test_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies come from this environment through a path file, which does not bring the checkout along."""
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    python = fresh / "bin" / "python"
    install = ["install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    site = next((fresh / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    code = """
import json, pathlib, sys
import workbench, moe_kernels
from workbench.core.record import data_root
from workbench.suite import find_notebooks
from workbench.experiments import load, slugs
here = pathlib.Path(workbench.__file__).parent
print(json.dumps({
    "files": [workbench.__file__, moe_kernels.__file__, str(data_root()), str(find_notebooks()[0].path)],
    "slugs": [load(s).slug for s in slugs()],
    "notebooks": [n.slug for n in find_notebooks()],
    "scripts": sorted(p.name for p in here.rglob("*.js")),
    "template": (here / "suite" / "templates" / "report.html.j2").is_file(),
}))
"""
    ran = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert all(f.startswith(str(site)) for f in found["files"]), found["files"]
    from workbench.experiments import slugs
    from workbench.suite import find_notebooks

    assert found["slugs"] == slugs() and found["notebooks"] == [n.slug for n in find_notebooks()]
    assert found["scripts"] == sorted(p.name for p in (ROOT / "workbench").rglob("*.js")) and found["scripts"]
    assert found["template"]
    listed = subprocess.run(
        [fresh / "bin" / "workbench", "list", "--json"], capture_output=True, text=True, cwd=tmp_path
    )
    assert listed.returncode == 0, listed.stderr
    assert {r["slug"] for r in json.loads(listed.stdout)} >= set(slugs())
