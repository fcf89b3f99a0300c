"""Submission and device time of regions over sizes, in rounds, gathered into one row per region and size.

Rounds visit every region once before any is visited again, so that a slow spell of a shared host reaches a few repeats
of many regions instead of all repeats of one. Standard library and torch only.

Source: report, Section 8.3 (Equation 12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

Call = Callable[[], Any]


@dataclass(frozen=True)
class Key:
    """What one row is about: a layer, its passes, the mode of submission and the size of its microbatch."""

    layer: str
    passes: str
    mode: str
    tokens: int


@dataclass
class SizeSweep:
    """Samples of every key, and what else is known about it.

    Attributes:
        per_us: result of `spin_cycles_per_us`.
        measure: what measures a region in the place of `measure_region`.
        submit_us: per key, repeats of all rounds in order.
        device_us: alike.
        notes: per key, further columns of its row.
    """

    per_us: float
    measure: Callable[..., Any] | None = None
    submit_us: dict[Key, list[float]] = field(default_factory=dict)
    device_us: dict[Key, list[float]] = field(default_factory=dict)
    notes: dict[Key, dict[str, Any]] = field(default_factory=dict)

    def add(self, key: Key, call: Call, repeats: int, *, count: bool = False) -> None:
        """Measure `repeats` calls of a region as one more round of its key; warm-up is longer in the first."""
        from workbench.measure.regions import measure_region

        first, measure = key not in self.notes, self.measure or measure_region
        region = measure(call, repeats=repeats, warmup=3 if first else 1, per_us=self.per_us, count=count)
        self.submit_us.setdefault(key, []).extend(region.submit_us)
        self.device_us.setdefault(key, []).extend(region.device_us)
        kept = self.notes.setdefault(key, {"rounds": 0, "host_held_up": False, "launches": None})
        kept["rounds"] += 1
        kept["host_held_up"] |= region.waited
        if count:
            kept["launches"] = region.launches

    def add_idle(self, key: Key, call: Call, *, batch: int, calls: int = 8) -> None:
        """Measure wall time per call, and the device's idle share and operations, all of back-to-back calls."""
        from workbench.measure.regions import back_to_back
        from workbench.measure.timing import percentile, wall_us

        walls = wall_us(call, repeats=2, warmup=1, batch=batch)
        idle, launches = back_to_back(call, calls)
        self.note(key, wall_us_p50=round(percentile(walls, 0.5), 3), idle_share=round(idle, 5), launches=launches)

    def note(self, key: Key, **values: Any) -> None:
        """Keep further columns of a key that was measured."""
        self.notes[key].update(values)

    def extend(self, other: SizeSweep) -> None:
        """Add the rounds of another sweep; of a key that both have, this one's further columns stay."""
        for key, notes in other.notes.items():
            self.submit_us.setdefault(key, []).extend(other.submit_us[key])
            self.device_us.setdefault(key, []).extend(other.device_us[key])
            mine = self.notes.get(key)
            if mine is None:
                self.notes[key] = dict(notes)
            else:
                mine["rounds"] += notes["rounds"]
                mine["host_held_up"] |= notes["host_held_up"]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per key, in the order of their first round."""
        from workbench.measure.timing import summary

        for key, notes in self.notes.items():
            times = summary(self.submit_us[key], "submit_us") | summary(self.device_us[key], "device_us")
            yield {"kind": "measured"} | asdict(key) | times | notes

    def repeats(self) -> Iterator[dict[str, Any]]:
        """One row per key and repeat, those of each round behind another."""
        for key in self.notes:
            for submit, device in zip(self.submit_us[key], self.device_us[key], strict=True):
                yield asdict(key) | {"submit_us": round(submit, 2), "device_us": round(device, 2)}

    def write(self, recorder: Any) -> None:
        """Write the rows, and the raw repeats as a table of their own."""
        for row in self.rows():
            recorder.row(**row)
        for row in self.repeats():
            recorder.row("repeats", **row)
