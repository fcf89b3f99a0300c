"""Headless Chromium and a JupyterLab of its own for browser tests."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """A headless Chromium, closed with the module: playwright keeps an event loop running, which blocks nbclient."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=FLAGS)


@dataclass
class Watched:
    """A page and everything that went wrong on it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("requestfailed", lambda r: self.failed.append(r.url[:200]))


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Function that opens an address in a context of its own and returns a `Watched` page."""
    contexts = []

    def open_page(address: str, **options: Any) -> Watched:
        offline = options.pop("offline", False)
        options = {"viewport": {"width": 1100, "height": 900}} | options
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_offline(offline)
        watched = Watched(context.new_page())
        watched.page.goto(address)
        return watched

    yield open_page
    for context in contexts:
        context.close()


@dataclass
class Lab:
    """A running JupyterLab."""

    base: str
    token: str
    folder: Path

    def address(self, notebook: str) -> str:
        return f"{self.base}/lab/tree/{notebook}?token={self.token}&reset"

    def api(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"{self.base}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def stop_kernels(self) -> None:
        """A closed tab keeps its kernel; each holds memory until the server goes."""
        for kernel in self.api("kernels"):
            self.api(f"kernels/{kernel['id']}", "DELETE")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a free port of loopback, with settings, data and runtime folders of its own."""
    pytest.importorskip("jupyterlab")
    home = tmp_path_factory.mktemp("lab")
    folder = home / "notebooks"
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    for path in (folder, settings):
        path.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_TOKEN": token,
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    command += ["--LabApp.expose_app_in_browser=True"]
    log = (home / "log.txt").open("wb")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    running = Lab(f"http://127.0.0.1:{port}", token, folder)
    try:
        _wait_until_up(running, server, home / "log.txt")
        yield running
        running.stop_kernels()
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
        log.close()


def _wait_until_up(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            lab.api("status")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text(errors='replace')[-2000:]}")
