"""Submission headroom, idle time and blocks ahead of a simulated program.

Headroom is submitted but not yet completed device work: it jumps by an operation's duration when its submission is
complete and drains at unit rate while the stream executes. A device's headroom is the sum over its streams, so with
several streams busy it drains faster than unit rate and may be positive while one of them is idle.

Source: report Section 8.1, Figures 29-31.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.models.submission import Timeline, lane_name


@dataclass(frozen=True, eq=False)
class Curve:
    """Exact piecewise-linear curve: a line from (t[i], after[i]) to (t[i + 1], before[i + 1]), jumps at the t's.

    `t` [k] increasing, `before` [k] the value just before each, `after` [k] the value at it; zero before t[0].
    """

    t: np.ndarray
    before: np.ndarray
    after: np.ndarray

    def at(self, x: float | np.ndarray) -> np.ndarray:
        """Value at x (any shape), right-continuous; constant after the last breakpoint, zero before the first."""
        x = np.asarray(x)
        i = np.searchsorted(self.t, x, side="right") - 1
        inside = np.clip(i, 0, len(self.t) - 1)
        nxt = np.clip(inside + 1, 0, len(self.t) - 1)
        width = self.t[nxt] - self.t[inside]
        part = np.where(width > 0, (x - self.t[inside]) / np.where(width > 0, width, 1), 0.0)
        value = self.after[inside] + part * (self.before[nxt] - self.after[inside]) * (nxt > inside)
        return np.where(i < 0, 0, value)

    def drained(self) -> float:
        """Total descent along the lines: the work done, in device-time units."""
        return float(np.sum(self.after[:-1] - self.before[1:]))

    def path(self) -> tuple[np.ndarray, np.ndarray]:
        """The curve as x and y [2k] for drawing, jumps as vertical strokes."""
        return np.repeat(self.t, 2), np.column_stack([self.before, self.after]).ravel()


def device_headroom(timeline: Timeline, device: int = 0, stream: int | None = None) -> Curve:
    """Headroom of a device: the sum of its streams' curves; with `stream` that one's alone.

    On one stream without cross-stream dependencies it is zero exactly while the stream is idle.
    """
    lanes = _device_lanes(timeline, device, stream)
    mine = np.isin(timeline.columns.op_lane, lanes)
    points = (timeline.op_submitted[mine], timeline.op_start[mine], timeline.op_end[mine])
    t = np.unique(np.concatenate([np.array([0, timeline.makespan], timeline.op_start.dtype), *points]))
    values = [_stream_values(timeline, lane, t) for lane in lanes]
    return Curve(t, sum(v[0] for v in values), sum(v[1] for v in values))  # type: ignore[arg-type]


def work_intervals(timeline: Timeline, device: int = 0) -> np.ndarray:
    """Union of the device's executing intervals, [k, 2], sorted, disjoint and not touching."""
    mask = np.isin(timeline.columns.op_lane, _device_lanes(timeline, device)) & (timeline.op_end > timeline.op_start)
    order = np.argsort(timeline.op_start[mask], kind="stable")
    start, end = timeline.op_start[mask][order], timeline.op_end[mask][order]
    if not len(start):
        return np.empty((0, 2), timeline.op_start.dtype)
    reach = np.maximum.accumulate(end)
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([start[first], reach[last]])


def idle_intervals(timeline: Timeline, device: int = 0, window: tuple[float, float] | None = None) -> np.ndarray:
    """Times in `window` (default: zero to makespan) at which no stream of the device executes, [k, 2]."""
    low, high = (0, timeline.makespan) if window is None else window
    if high < low:
        raise ValueError(f"idle window: expected end >= start, got {window}")
    busy = np.clip(work_intervals(timeline, device), low, high)
    gaps = np.column_stack([np.append(low, busy[:, 1]), np.append(busy[:, 0], high)])
    return gaps[gaps[:, 1] > gaps[:, 0]]


def busy_window(timeline: Timeline, device: int = 0) -> tuple[float, float]:
    """First start and last end of the device's work, (0, 0) when it has none."""
    busy = work_intervals(timeline, device)
    return (busy[0, 0].item(), busy[-1, 1].item()) if len(busy) else (0, 0)


def block_of_range(timeline: Timeline, level: str = "block") -> np.ndarray:
    """int64 [r]: number (in order of push) of the range of this level that encloses each range, -1 for none."""
    c = timeline.columns
    block = np.full(len(c.range_name), -1, np.int64)
    number = 0
    for r, parent in enumerate(np.asarray(c.range_parent).tolist()):
        if c.range_level[r] == level:
            block[r] = number
            number += 1
        elif parent >= 0:
            block[r] = block[parent]
    return block


def block_of_op(timeline: Timeline, level: str = "block") -> np.ndarray:
    """int64 [m]: number of the block whose submission holds each operation, -1 for none (the initial lead)."""
    c = timeline.columns
    blocks = np.append(block_of_range(timeline, level), -1)
    step = c.op_step
    if not len(c.kind):
        return np.full(len(step), -1, np.int64)
    return np.where(step >= 0, blocks[np.asarray(c.range_of_step)[step]], -1)


def blocks_ahead(timeline: Timeline, level: str = "block") -> Curve:
    """How many blocks the host's current block is ahead of the furthest block that a device has started (steps)."""
    c = timeline.columns
    pushes = np.array([p for p, name in zip(c.range_push, c.range_level) if name == level], dtype=np.int64)
    begun = np.sort(timeline.host_start[pushes])
    order = np.argsort(timeline.op_start, kind="stable")
    started = timeline.op_start[order]
    furthest = np.maximum.accumulate(np.append(-1, block_of_op(timeline, level)[order]))
    t = np.unique(np.concatenate([[0, timeline.makespan], begun, started]))

    def ahead(side: Any) -> np.ndarray:
        host = np.searchsorted(begun, t, side=side) - 1
        return host - furthest[np.searchsorted(started, t, side=side)]

    return Curve(t, ahead("left"), ahead("right"))


def queued_blocks(timeline: Timeline, level: str = "block") -> Curve:
    """Number of blocks submitted (their first operation is) but not started on a device (steps)."""
    block = block_of_op(timeline, level)
    keep = block >= 0
    count = int(block.max(initial=-1)) + 1
    submitted = np.full(count, np.inf)
    start = np.full(count, np.inf)
    np.minimum.at(submitted, block[keep], timeline.op_submitted[keep])
    np.minimum.at(start, block[keep], timeline.op_start[keep])
    submitted, start = np.sort(submitted[np.isfinite(submitted)]), np.sort(start[np.isfinite(start)])
    t = np.unique(np.concatenate([[0, timeline.makespan], submitted, start]))

    def queued(side: Any) -> np.ndarray:
        return np.searchsorted(submitted, t, side=side) - np.searchsorted(start, t, side=side)

    return Curve(t, queued("left"), queued("right"))


def _device_lanes(timeline: Timeline, device: int, stream: int | None = None) -> list[int]:
    lanes = timeline.columns.lanes
    found = [i for i, lane in enumerate(lanes) if lane[0] == device and stream in (None, lane[1])]
    if not found:
        what = f"device {device}" if stream is None else f"lane {lane_name((device, stream))}"
        raise ValueError(f"no {what}: this program uses {', '.join(map(lane_name, lanes)) or 'none'}")
    return found


def _stream_values(timeline: Timeline, lane: int, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """H(t-) and H(t) of one stream; exactly zero wherever nothing is outstanding, whatever the rounding."""
    duration = timeline.columns.op_duration
    mine = (np.asarray(timeline.columns.op_lane) == lane) & (duration > 0)
    start, end, duration = timeline.op_start[mine], timeline.op_end[mine], duration[mine]
    order = np.argsort(timeline.op_submitted[mine], kind="stable")
    submitted = timeline.op_submitted[mine][order]
    zero = np.zeros(1, duration.dtype)
    submitted_work = np.concatenate([zero, np.cumsum(duration[order])])
    finished_work = np.concatenate([zero, np.cumsum(duration)])
    finished = np.searchsorted(end, t, side="right")
    begun = np.searchsorted(start, t, side="left")
    running = begun > finished
    partial = np.where(running, t - start[np.minimum(finished, max(len(start) - 1, 0))], 0) if len(start) else 0 * t
    values = []
    for side in ("left", "right"):
        count = np.searchsorted(submitted, t, side=side)
        values.append(np.where(count == finished, 0, submitted_work[count] - finished_work[finished] - partial))
    return values[0], values[1]
