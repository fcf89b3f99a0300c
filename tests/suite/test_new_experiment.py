"""In a copy of the checkout: `workbench new` and every pre-commit hook, each seen to fail and to pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLUG = "first_try"


class Checkout:
    """A copy of the tree, as git sees it, in which commands run with the copy's own packages."""

    def __init__(self, path: Path) -> None:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        try:
            files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("not a git checkout")
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, path / name)
        self.path = path
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = os.environ | {"PATH": tools, "PYTHONPATH": f"{path}{os.pathsep}{path / 'kernels'}"}
        self.env |= {"PRE_COMMIT_HOME": str(path.parent / "hooks"), "GIT_CONFIG_GLOBAL": os.devnull}
        self.run("git", "init", "-q")
        self.run("git", "add", "-A")

    def run(self, *command: str, status: int = 0) -> str:
        """Run a command; return what it printed."""
        ran = subprocess.run(command, cwd=self.path, env=self.env, capture_output=True, text=True)
        assert ran.returncode == status, f"{command}: {ran.returncode}\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}"
        return ran.stdout + ran.stderr

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that is there."""
        text = (self.path / name).read_text()
        assert old in text
        (self.path / name).write_text(text.replace(old, new, 1))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A copy of the tree."""
    return Checkout(tmp_path / "copy")


@pytest.mark.slow
def test_a_new_experiment_fails_until_its_claim_is_stated(checkout: Checkout) -> None:
    told = checkout.run("workbench", "new", SLUG)
    assert f"wrote notebooks/tools/{SLUG}.ipynb" in told and f"workbench run {SLUG}" in told
    checkout.run("workbench", "sync", "--check")
    checkout.run("ruff", "check", ".")
    checkout.run("ruff", "format", "--check", ".")
    checkout.run("git", "add", "-A")
    rules = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_architecture.py")
    left = checkout.run(*rules, "-k", "left_to_fill_in or thin", status=1)
    assert f"test_nothing_is_left_to_fill_in[{SLUG}]" in left and "1 failed" in left
    test = (sys.executable, "-m", "pytest", "-q", f"tests/experiments/test_{SLUG}.py")
    assert "TODO: state the claim" in checkout.run("workbench", "show", SLUG, status=1)
    checkout.run(*test, status=1)
    assert "TODO: state the claim" in checkout.run("workbench", "run", SLUG, "--out", "out", status=1)

    module = f"workbench/experiments/{SLUG}.py"
    checkout.edit(module, '"TODO: state the claim", False', '"no value is below zero", values.min() >= 0')
    checkout.run(*test)
    for name in (module, f"notebooks/tools/{SLUG}.ipynb", f"tests/experiments/test_{SLUG}.py"):
        text = (checkout.path / name).read_text()
        (checkout.path / name).write_text(text.replace("TODO: ", ""))
    checkout.run("workbench", "sync")
    checkout.run("git", "add", "-A")
    checkout.run(*rules)
    assert "claims: 1 held" in checkout.run("workbench", "run", SLUG, "--out", "out")
    assert f"{SLUG!r} is taken" in checkout.run("workbench", "new", SLUG, status=2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["Bad-Name"], "expected a name of 2 to 32 small letters"),
        (["../up"], "expected a name of 2 to 32 small letters"),
        (["class"], "neither a word of Python"),
        (["tools"], "nor a group"),
        (["op_router"], "'op_router' is taken: workbench/experiments/op_router.py exists"),
        (["op_sheets"], "'op_sheets' is taken: tests/experiments/test_op_sheets.py exists"),
        (["fresh", "--group", "attic"], "--group attic: expected one of s08_sync_free, appendix_b, tools"),
    ],
)
def test_a_bad_or_taken_name_is_refused(args: list[str], words: str) -> None:
    from typer.testing import CliRunner

    from workbench.cli import app

    result = CliRunner().invoke(app, ["new", *args])
    assert result.exit_code == 2 and words in result.output


@pytest.mark.slow
def test_every_hook_passes_here_and_fails_where_it_should(checkout: Checkout) -> None:
    hooks = ("pre-commit", "run", "--all-files")
    notebook = "notebooks/s08_sync_free/fig29_running_dry.ipynb"
    breaks = {
        "ruff-check": ("workbench/__init__.py", "from typing import Any", "import os\nfrom typing import Any"),
        "ruff-format": ("workbench/__init__.py", '__version__ = "', '__version__   = "'),
        "notebooks": (notebook, '"execution_count": null', '"execution_count": 1'),
        "sync": (notebook, "blocks: int = 8", "blocks: int = 9"),
    }
    told = checkout.run(*hooks)
    assert "Skipped" not in told and told.count("Passed") == len(breaks), "a hook that nothing here breaks"
    for hook, (name, old, new) in breaks.items():
        checkout.edit(name, old, new)
        assert "Failed" in checkout.run(*hooks[:2], hook, hooks[2], status=1)
        checkout.run("git", "checkout", "-q", "--", name)
