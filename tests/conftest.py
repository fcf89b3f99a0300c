"""Fixtures and collection rules of the whole suite; standard library and pytest only: bare GPU machines run it too."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = "workbench.pytest_plugin"
_installed = any(e.value == PLUGIN for e in importlib.metadata.entry_points(group="pytest11"))
# Where the project only lies on the path, nothing has loaded its plugin; pytest refuses the same module twice.
# No test depends on the clock, or on what an earlier run found.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    calm = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("calm", **calm)
    settings.load_profile("calm")
pytest_plugins = [] if _installed and not os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD") else [PLUGIN]


def shared_dir() -> Path | None:
    """Return the folder of shared material (report text, traces of others), None where it is absent."""
    told = os.environ.get("WORKBENCH_SHARED")
    for path in [Path(told)] if told else [ROOT.parent / "shared", ROOT / "shared"]:
        if path.is_dir():
            return path
    return None


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of shared material; skips where it is absent."""
    path = shared_dir()
    if path is None:
        pytest.skip("the shared material (report text, traces of others) is not on this machine")
    return path


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the system's Chromium; skips where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no chromium on this machine: apt-get install chromium")


def _gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests with a reason where no GPU is visible."""
    marked = [i for i in items if i.get_closest_marker("gpu")]
    if marked and not _gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none is visible here"))
