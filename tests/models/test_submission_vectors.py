"""The committed vectors are the model's answers, and cover what a port of the rule must get right."""

from __future__ import annotations

import json

from queue_vectors import PATH, document


def test_vectors_are_current() -> None:
    assert PATH.read_text(encoding="utf-8") == document()


def test_vectors_cover_the_rule() -> None:
    cases = json.loads(PATH.read_text(encoding="utf-8"))["cases"]
    assert len(cases) >= 30
    kinds = {step["kind"] for case in cases for step in case["program"]["steps"]}
    assert kinds == {"submit", "work", "wait", "record", "stream_wait", "push", "pop"}
    queries = [q for case in cases for q in case["expect"]["queries"]]
    states = {(s["kind"], s.get("reason")) for q in queries for s in q["gpu"].values()}
    assert states == {("execute", None), ("idle", "submission"), ("idle", "dependency"), ("done", None)}
    assert max(q["queued_blocks"] for q in queries) >= 2
