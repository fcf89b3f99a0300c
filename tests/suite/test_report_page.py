"""The page of a run: everything escaped, a summary with links, nothing from outside, usable on a phone."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from workbench.suite import thumbnails
from workbench.suite.report_page import render, write_page

HOSTILE = "\"'><img src=x onerror=alert(1)><script>alert(2)</script>&{{ 7*7 }}</style></pre>"
PICTURE = b"\x89PNG\r\n\x1a\n"


def outcome(slug: str, status: str, **change: Any) -> dict[str, Any]:
    """Return the outcome of one notebook."""
    base = {"slug": slug, "group": "tools", "title": slug.title(), "status": status, "seconds": 75.0, "attempts": 1}
    base |= {"peak_memory_bytes": 100 * 2**20, "code_cells": 3, "params": {}, "source": "model", "recording": None}
    base |= {"badge": "computed by a model", "checks": [], "html_error": None, "error": None}
    return base | change


def summary(*outcomes: dict[str, Any]) -> dict[str, Any]:
    """Return a run's summary."""
    return {
        "started": "2026-01-02T03:04:05+00:00",
        "seconds": 12.3,
        "commit": "0123456789abcdef",
        "dirty": False,
        "machine": {
            "gpus": [],
            "cpu": "A CPU",
            "cores": 2,
            "memory_MiB": 24 * 1024,
            "system": "Linux",
            "python": "3.11.7",
        },
        "exit_status": 1,
        "peak_memory_bytes": 2**30,
        "notebooks": list(outcomes),
    }


class Page(HTMLParser):
    """Collects tags, texts and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    checks = [{"claim": HOSTILE, "holds": False, "value": HOSTILE, "known": HOSTILE}]
    error = {"kind": HOSTILE, "message": HOSTILE, "cell": 1, "excerpt": HOSTILE, "log": HOSTILE}
    bad = outcome(
        "bad", "failed", title=HOSTILE, group=HOSTILE, badge=HOSTILE, checks=checks, error=error, html_error=HOSTILE
    )
    bad["params"] = {HOSTILE: HOSTILE}
    page = Page(render(tmp_path, summary(bad, outcome(HOSTILE, "passed", source=HOSTILE)), {HOSTILE: HOSTILE}))
    plain = Page(render(tmp_path, summary(outcome("bad", "failed"), outcome("good", "passed")), {}))
    kinds = {t for t, _ in page.tags}
    assert sum(t == "script" for t, _ in page.tags) == 1 and "img" not in kinds
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    assert kinds - {"details", "summary", "pre", "p", "ul", "li", "span"} <= {t for t, _ in plain.tags}
    assert sum(HOSTILE in t for t in page.texts) >= 8


def test_summary_counts_are_right_and_lead_to_what_failed(tmp_path: Path) -> None:
    held, failed = ({"claim": f"claim {h}", "holds": h, "value": 1.23456} for h in (True, False))
    known = failed | {"known": "another chip"}
    error = {"kind": "timeout", "message": "too slow", "cell": 2, "excerpt": ""}
    run = summary(
        outcome("b_good", "passed", checks=[held, known, {"claim": "n", "holds": None, "value": None}]),
        outcome("skip", "skipped", attempts=0, error=error),
        outcome("c_claim", "claim_failed", checks=[held, failed]),
        outcome("a_bad", "failed", error=error),
    )
    text = render(tmp_path, run, {})
    found = re.findall(r'<a class="tile[^>]*href="([^"]*)"><b[^>]*>([^<]*)</b><span>([^<]*)', text)
    assert {label: (count, href) for href, count, label in found} == {
        "notebooks": ("4", "#sections"),
        "failed": ("1", "#no-result"),
        "skipped": ("1", "#no-result"),
        "with a failed claim": ("1", "#claims-failed"),
        "claims held": ("2", "#sections"),
        "claims failed": ("1", "#claims-failed"),
        "known to differ": ("1", "#claims-differs"),
        "not decided": ("1", "#claims-na"),
    }
    listed = dict(re.findall(r'<ul id="([^"]+)">(.*?)</ul>', text, flags=re.S))
    links = {name: re.findall('href="#([^"]+)"', part) for name, part in listed.items()}
    assert links == {
        "no-result": ["a_bad", "skip"],
        "claims-failed": ["c_claim"],
        "claims-differs": ["b_good"],
        "claims-na": ["b_good"],
    }
    page = Page(text)
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    targets = {href[1:] for _, attrs in page.tags if (href := attrs.get("href") or "").startswith("#")}
    assert targets <= ids and {"a_bad", "b_good", "c_claim", "skip"} <= targets
    assert "[1.235]" in listed["claims-failed"] and "another chip" in listed["claims-differs"]
    assert "too slow" in listed["no-result"] and "1 min 15 s" in text and "12.3 s" in text


def test_sections_are_those_of_the_notebook_index(tmp_path: Path) -> None:
    from workbench.suite.generated import HEADINGS

    held = [{"claim": "c", "holds": True, "value": 1}]
    order = ["tools", "mine", "appendix_b", "s08_sync_free", "tools"]
    run = summary(*(outcome(f"n{i}", "passed", group=group, checks=held) for i, group in enumerate(order)))
    text = render(tmp_path, run, {})
    assert re.findall("<h2>(.*?)</h2>", text) == [*HEADINGS.values(), "mine"]
    parts = re.split("<h2>", text.split("<main>")[1])[1:]
    assert [re.findall(r'<article .* id="(\w+)"', part) for part in parts] == [["n3"], ["n2"], ["n0", "n4"], ["n1"]]
    rows = re.findall(r"<tr><td><a[^>]*>([^<]*)</a></td><td>(\d+)</td>\s*<td >(\d+)</td>", text)
    assert rows == [(HEADINGS["s08_sync_free"], "1", "1"), (HEADINGS["appendix_b"], "1", "1"),
                    (HEADINGS["tools"], "2", "2"), ("mine", "1", "1")]  # fmt: skip


def test_page_says_when_where_and_on_which_commit_it_ran(tmp_path: Path) -> None:
    def about(**change: Any) -> dict[str, str]:
        text = render(tmp_path, summary() | change, {})
        return dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text))

    told = about()
    assert told["Started"] == "2026-01-02 03:04:05 UTC" and told["Commit"] == "0123456789ab"
    assert told["Machine"] == "no GPU; A CPU, 2 cores, 24 GiB; Linux, Python 3.11.7"
    assert about(dirty=True)["Commit"] == "0123456789ab, with uncommitted changes"
    assert about(commit=None, dirty=True)["Commit"] == "unknown"
    gpus = summary()["machine"] | {"gpus": ["H", "H"], "cpu": None, "memory_MiB": None}
    assert about(machine=gpus)["Machine"] == "2 x H; unknown processor, 2 cores; Linux, Python 3.11.7"


def test_badge_stands_beneath_its_figure(tmp_path: Path) -> None:
    text = render(tmp_path, summary(outcome("a", "passed", badge="recorded on X"), outcome("b", "failed")), {})
    (figure,) = re.findall("<figure>(.*?)</figure>", text, flags=re.S)
    assert re.search(r"<figcaption>.*recorded on X.*</figcaption>", figure)


def test_nothing_is_loaded_from_outside(tmp_path: Path) -> None:
    page = Page(render(tmp_path, summary(outcome("a", "passed")), {}))
    assert not [attrs for tag, attrs in page.tags if tag in ("link", "iframe") or (tag == "script" and "src" in attrs)]
    assert not [attrs["href"] for _, attrs in page.tags if re.match(r"\w+:", attrs.get("href") or "")]


def notebook_with(path: Path, data: dict[str, Any]) -> Path:
    """Write an executed notebook with one output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    output = {"output_type": "display_data", "data": data, "metadata": {}}
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": "f", "outputs": [output], "metadata": {}}]}))
    return path


def test_missing_browser_costs_the_picture_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-such-browser"))
    monkeypatch.setenv("PATH", str(tmp_path))
    notebook_with(tmp_path / "notebooks" / "fig.ipynb", {thumbnails.PLOTLY_MIME: {"data": [], "layout": {}}})
    page = write_page(tmp_path, summary(outcome("fig", "passed"))).read_text()
    assert "No picture: no Chromium or Chrome was found to draw it" in page
    assert not list(tmp_path.rglob("*.webp"))


def test_browser_that_hangs_costs_the_picture_only(
    tmp_path: Path, no_orphans: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = tmp_path / "browser"
    browser.write_text("#!/bin/sh\nexec sleep 600\n")
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    notebook = notebook_with(tmp_path / "fig.ipynb", {thumbnails.PLOTLY_MIME: {"data": [], "layout": {}}})
    assert thumbnails.draw([notebook], timeout_s=4) == {"fig": "drawing took more than 4 s"}


def test_png_output_is_taken_as_it_is_and_kept(tmp_path: Path) -> None:
    import base64

    notebook = notebook_with(tmp_path / "notebooks" / "fig.ipynb", {"image/png": base64.b64encode(PICTURE).decode()})
    page = write_page(tmp_path, summary(outcome("fig", "passed"))).read_text()
    assert base64.b64encode(PICTURE).decode() in page and 'href="notebooks/fig.ipynb"' in page
    picture = notebook.with_suffix(".png")
    picture.write_bytes(b"kept")
    assert thumbnails.draw([notebook]) == {} and picture.read_bytes() == b"kept"


@pytest.mark.browser
def test_page_in_a_browser(tmp_path: Path, chromium: str) -> None:
    """Figures are drawn; filters and search work; no overflow on a phone; no console message, no request."""
    from playwright.sync_api import Dialog, sync_playwright

    figure = {"data": [{"type": "bar", "x": [1, 2], "y": [3, 4]}], "layout": {}}
    figure["layout"] = {"title": {"text": "t", "font": {"color": "#767676"}}}
    for slug in ("one", "two"):
        notebook_with(tmp_path / "notebooks" / f"{slug}.ipynb", {thumbnails.PLOTLY_MIME: figure})
    long = {"claim": "word " * 60 + "x" * 300, "holds": False, "value": "y" * 200}
    run = summary(
        outcome("one", "passed"),
        outcome("two", "claim_failed", checks=[long], title=HOSTILE),
        outcome("three", "failed", source="live"),
    )
    page_path = write_page(tmp_path, run)
    pictures = re.findall('data:image/webp;base64,[^"]*', page_path.read_text())
    assert len(pictures) == 4 and len(set(pictures)) == 2, "a light and a dark one of each figure"
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-quic"])
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        noise: list[str] = []

        def refuse(dialog: Dialog) -> None:
            noise.append("dialog")
            dialog.dismiss()

        page.on("console", lambda m: noise.append(m.text))
        page.on("pageerror", lambda e: noise.append(str(e)))
        page.on("dialog", refuse)
        page.on("request", lambda r: noise.append(r.url) if r.url.startswith("http") else None)
        page.goto(page_path.as_uri())

        def shown() -> list[str]:
            return page.eval_on_selector_all(".card:not([hidden])", "cards => cards.map(c => c.id)")

        assert shown() == ["one", "two", "three"]
        shown_picture = page.evaluate("document.images[0].currentSrc")
        assert shown_picture == pictures[0], "the dark picture on a dark page"
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        right = "Math.max(...[...document.querySelectorAll('.card *')].map(e => e.getBoundingClientRect().right))"
        assert page.evaluate(right) <= 390
        assert page.evaluate("[...document.images].every(i => i.naturalWidth > 300)")
        page.click("button[data-value=passed]")
        assert shown() == ["one"]
        page.click("button[data-value='']")
        page.click("button[data-value=live]")
        assert shown() == ["three"]
        page.click("button[data-value=live]")
        page.fill("#search", "word xxx")
        assert shown() == ["two"]
        page.fill("#search", "no such words")
        assert shown() == [] and page.is_visible("#none") and not page.is_visible("section h2")
        page.click("a.tile[href='#claims-failed']")
        page.click("#claims-failed a")
        assert shown() == ["one", "two", "three"], "a link shows what the filter hid"
        top = page.eval_on_selector("#two", "card => card.getBoundingClientRect().top")
        assert 0 <= top < 800
        browser.close()
    assert noise == []
