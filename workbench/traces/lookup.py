"""Which spans enclose an instant: source line, nearest operator and range of a call, robust to overrunning frames."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from workbench.traces.trace import CPU_OP, PYTHON, RANGE, Trace

_BLOCK = 1024
_FRAME = re.compile(r"^(?P<path>.+?)\((?P<line>\d+)\): (?P<function>.*)$", re.DOTALL)
_LIBRARY = re.compile(
    r"(^|/)(torch|triton|functorch|torchgen)/|^<frozen|/lib/python3[^/]*/(?!site-packages|dist-packages)"
)
NO_STACKS = (
    "no Python stacks in this trace, so waits have no source line: record with torch.profiler.profile(with_stack=True)"
)


class Enclosing:
    """Spans sorted by start, asked which of them contain an instant; skips blocks that ended before it."""

    def __init__(self, start_ns: np.ndarray, end_ns: np.ndarray) -> None:
        self.start, self.end = start_ns, end_ns
        edges = np.arange(0, len(end_ns), _BLOCK)
        self.reach = np.maximum.reduceat(end_ns, edges) if len(end_ns) else end_ns

    def rows(self, t_ns: int) -> np.ndarray:
        """Rows with start <= t < end, outermost (earliest start) first."""
        stop = int(np.searchsorted(self.start, t_ns, "right"))
        found = []
        for block in np.flatnonzero(self.reach[: -(-stop // _BLOCK)] > t_ns):
            begin = int(block) * _BLOCK
            end = min(begin + _BLOCK, stop)
            found.append(begin + np.flatnonzero(self.end[begin:end] > t_ns))
        return np.concatenate(found) if found else np.empty(0, np.int64)


@dataclass(frozen=True)
class Where:
    """Where in the program a call was made; empty strings where the trace does not say."""

    line: str
    op: str
    range: str

    def as_dict(self) -> dict[str, str | None]:
        """Plain values for JSON, None where the trace does not say."""
        return {"line": self.line or None, "op": self.op or None, "range": self.range or None}


class Locator:
    """Finds line, operator and range of instants on the threads of a trace; indexes each thread once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._index: dict[tuple[int, int], tuple[Enclosing, np.ndarray]] = {}
        self.has_stacks = bool((trace.spans.kind == PYTHON).any())

    def _spans(self, thread: int, kind: int) -> tuple[Enclosing, np.ndarray]:
        key = (thread, kind)
        if key not in self._index:
            spans = self.trace.spans
            rows = np.flatnonzero((spans.kind == kind) & (spans.thread == thread))
            self._index[key] = (Enclosing(spans.start_ns[rows], spans.end_ns[rows]), spans.name[rows])
        return self._index[key]

    def enclosing(self, thread: int, kind: int, t_ns: int) -> list[tuple[str, int, int]]:
        """(name, start_ns, end_ns) of the spans of a kind that enclose an instant, outermost first."""
        index, names = self._spans(thread, kind)
        return [(self.trace.names[names[i]], int(index.start[i]), int(index.end[i])) for i in index.rows(t_ns)]

    def names(self, thread: int, kind: int, t_ns: int) -> list[str]:
        """Names of the spans of a kind that enclose an instant, outermost first."""
        index, names = self._spans(thread, kind)
        return [self.trace.names[names[i]] for i in index.rows(t_ns)]

    def where(self, thread: int, t_ns: int) -> Where:
        """Innermost user frame, nearest aten operator, and innermost range at an instant of a thread."""
        ops = self.names(thread, CPU_OP, t_ns)
        aten = [n for n in ops if n.startswith("aten::")]
        ranges = self.names(thread, RANGE, t_ns)
        inner = [n for n in ranges if not n.startswith("ProfilerStep")]
        return Where(
            line=_user_line(self.names(thread, PYTHON, t_ns)) if self.has_stacks else "",
            op=(aten or ops or [""])[-1],
            range=(inner or ranges or [""])[-1],
        )


def _user_line(frames: list[str]) -> str:
    fallback = ""
    for name in reversed(frames):
        frame = _FRAME.match(name)
        if not frame:
            continue
        text = f"{frame['path']}:{frame['line']} ({frame['function']})"
        if not _LIBRARY.search(frame["path"]):
            return text
        fallback = fallback or text
    return fallback
