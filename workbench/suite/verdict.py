"""Judges an executed notebook by what it shows, never by papermill's own metadata.

Papermill marks cells "completed" that never ran (killed kernel, time-out) and lets ``sys.exit(0)`` pass. What decides
here: the exit status and error of the executing process, an execution count on every code cell, no error output, and
the machine-readable result that `Result.report` leaves behind.

Out of reach: an exception in a thread or an asyncio task that the notebook itself does not wait for leaves no mark.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from workbench.core.experiment import RESULT_MIME
from workbench.suite.catalog import source_of, tags_of

PASSED, CLAIM_FAILED, FAILED, INTERRUPTED, SKIPPED = "passed", "claim_failed", "failed", "interrupted", "skipped"

STANDINGS = ("failed", "differs", "held", "n/a")

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def nothing_shown() -> dict[str, Any]:
    """Return what an outcome says of results while there is none."""
    return {"source": None, "recording": None, "badge": None, "checks": []}


def judge(executed: Path, exit_status: int | None, error: dict[str, Any] | None, *, limit_s: float) -> dict[str, Any]:
    """Return ``status``, ``source``, ``badge``, ``recording``, ``checks`` and ``error`` of one executed notebook.

    Args:
        executed: the output notebook, perhaps missing or cut off.
        exit_status: of the executing process; None when it had to be killed at the time limit.
        error: what the executing process reported, if anything.
        limit_s: the time limit, for messages.
    """
    verdict: dict[str, Any] = {"status": FAILED, **nothing_shown(), "error": None}
    cells = cells_of(executed)
    results = results_of(cells or [])
    if results:
        verdict |= {k: results[0].get(k) for k in ("source", "recording", "badge")}
        verdict["checks"] = [c for r in results for c in r.get("checks", [])]
    if exit_status is None:
        verdict["error"] = _error("timeout", f"stopped at the limit of {limit_s:g} s for the notebook")
    elif error is not None:
        verdict["error"] = _error(error["kind"], error["message"], error.get("cell"), error.get("traceback", ""))
    elif exit_status != 0:
        verdict["error"] = _error("runner", f"the process that executes the notebook ended with status {exit_status}")
    elif cells is None:
        verdict["error"] = _error("runner", "no readable executed notebook was written")
    else:
        verdict["error"] = _silent_failure(cells, results)
    if verdict["error"] is None:
        verdict["status"] = CLAIM_FAILED if "failed" in map(standing, verdict["checks"]) else PASSED
    return verdict


def standing(check: dict[str, Any]) -> str:
    """Return how a claim stands: ``held``, ``failed``, ``differs`` (fails for a stated reason) or ``n/a``."""
    if check["holds"] is None:
        return "n/a"
    return "held" if check["holds"] else ("differs" if check.get("known") else "failed")


def _silent_failure(cells: list[dict[str, Any]], results: list[dict[str, Any]]) -> dict[str, Any] | None:
    code = [c for c in cells if c["cell_type"] == "code" and source_of(c).strip()]
    for number, cell in enumerate(code, 1):
        for output in cell.get("outputs", []):
            if output.get("output_type") == "error":
                text = "\n".join(output.get("traceback", []))
                message = f"{output.get('ename')}: {output.get('evalue')}"
                if output.get("ename") == "SystemExit":
                    message = f"cell {number} left the kernel with sys.exit({output.get('evalue')})"
                return _error("cell_error", message, number, text)
        if cell.get("execution_count") is None and "skip-execution" not in tags_of(cell):
            return _error("not_executed", f"cell {number} of {len(code)} was never executed", number)
    if not results:
        return _error("no_result", "the notebook reported no result (result.report() was not called)")
    for result in results:
        if not isinstance(result.get("source"), str) or not _are_checks(result.get("checks")):
            return _error("no_result", f"the reported result is malformed: {str(result)[:200]}")
    sources = {r["source"] for r in results}
    if len(sources) > 1:
        told = ", ".join(sorted(sources))
        return _error("mixed_sources", f"results of one notebook come from several sources: {told}")
    return None


def _are_checks(checks: Any) -> bool:
    return isinstance(checks, list) and all(
        isinstance(c, dict) and isinstance(c.get("claim"), str) and c.get("holds", "") in (True, False, None)
        for c in checks
    )


def cells_of(executed: Path) -> list[dict[str, Any]] | None:
    """Return the cells of an executed notebook; None where it is missing or cut off."""
    try:
        return json.loads(executed.read_bytes())["cells"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def results_of(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the machine-readable results among the outputs, in order."""
    outputs = (o for c in cells if c.get("cell_type") == "code" for o in c.get("outputs", []))
    found = [o["data"][RESULT_MIME] for o in outputs if isinstance(o.get("data"), dict) and RESULT_MIME in o["data"]]
    return [r for r in found if isinstance(r, dict)]


def _error(kind: str, message: str, cell: int | None = None, traceback: str = "") -> dict[str, Any]:
    lines = _ANSI.sub("", traceback).strip().splitlines()
    excerpt = "\n".join(line[:300] for line in lines[-25:])
    return {"kind": kind, "message": _ANSI.sub("", message)[:1000], "cell": cell, "excerpt": excerpt}
