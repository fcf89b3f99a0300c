"""Folders and files of archived histories: which runs they hold, and each run's segments, oldest first.

Understood besides plain tables: one table of several runs (a column that names the run, or `run - metric` headers as
Weights & Biases exports its panels) and one file per metric (`Wall time, Step, Value`, as TensorBoard exports).

Source: report, Appendix B.7 and B.8.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.training.histories import READERS, History, MergeReport, read_table, step_column, stitch, tidy

if TYPE_CHECKING:
    import polars as pl

RUN_COLUMNS = ("run", "run_name", "run_id", "arm", "schedule")
PANEL = re.compile(r"(?P<run>.+?) - (?P<metric>.+?)(?P<band>__MIN|__MAX)?", re.DOTALL)
SCALAR = {"step", "value", "wall time"}
# What trackers and training programs call the metrics that the experiments draw; compared in lower case.
ALIASES: dict[str, tuple[str, ...]] = {
    "ce": ("ce", "ce loss", "ce_loss", "cross_entropy", "cross entropy", "lm loss", "lm_loss", "loss", "train_loss"),
    "lbl": ("lbl", "lbl loss", "load_balancing_loss", "load balancing loss", "aux_loss"),
    "grad_norm": ("grad_norm", "grad norm", "gradient norm", "total grad norm"),
    "lr": ("lr", "learning_rate", "learning rate"),
    "tokens": ("tokens", "total_tokens", "total tokens", "consumed_tokens", "tokens_seen"),
    "batch": ("batch", "batch_size", "batch size", "global_batch_size"),
    "seconds": ("seconds", "_runtime", "runtime", "relative time (process)"),
}
Order = Literal["name", "start"]


@dataclass(frozen=True)
class Run:
    """One run of an archive.

    Attributes:
        name: of the run; empty where the archive does not say.
        seed: value of a `seed` column, 0 without one.
        segments: oldest first.
        title: the name, else the archive's; never empty, and no other run's.
    """

    name: str
    seed: int
    segments: tuple[History, ...]
    title: str

    def stitched(self) -> tuple[pl.DataFrame, MergeReport]:
        """Return the run's table and what stitching did; at an overlapping step the newest segment's row is kept."""
        return stitch(self.segments)

    @property
    def notes(self) -> list[str]:
        """What the reader did to each segment, one line each."""
        return [f"{s.name}: {note}" for s in self.segments for note in s.notes]


def read_archive(path: str | Path, *, step: str | None = None, order: Order = "name") -> list[Run]:
    """Read the histories of a file, or of every file below a folder (a subfolder is a run).

    Args:
        path: CSV, TSV, JSON lines or parquet; or a folder of them.
        step: name of the step column; found among the usual names when None.
        order: which segment is newer: the later one by name, numbers compared as numbers; or the later first step.
    Returns:
        Runs in order of name and seed.
    Raises:
        FileNotFoundError: no such path, or a folder without histories.
        ValueError: a file cannot be read as a history; the message names it.
    """
    root = Path(path)
    own = root.resolve().name if root.is_dir() else root.stem
    if order not in ("name", "start"):
        raise ValueError(f"order: expected 'name' or 'start', got {order!r}")
    if root.is_dir():
        files = [p for p in root.rglob("*") if p.is_file() and p.suffix.lower() in READERS]
        files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(root).parts)]
        if not files:
            raise FileNotFoundError(f"archive {root.name!r} holds no history ({', '.join(READERS)})")
    else:
        files, root = [root], root.parent
    found: dict[tuple[str, int], list[History]] = {}
    scalars: dict[tuple[str, str], dict[str, History]] = {}
    for file in sorted(files, key=lambda p: natural(p.relative_to(root).as_posix())):
        folder = file.parent.relative_to(root).as_posix().removeprefix(".")
        raw, notes = read_table(file)
        if raw.height and {c.strip().lower() for c in raw.columns} <= SCALAR and len(raw.columns) > 1:
            segment, metric = _tag(file.stem)
            read = _scalar(raw, metric, segment or folder or root.name, notes)
            scalars.setdefault((folder, segment), {})[metric] = read
            continue
        for run, seed, name, part in _split(raw, file.stem, step):
            found.setdefault((run or folder, seed), []).append(tidy(part, name, step=step, notes=notes))
    for (folder, _), metrics in scalars.items():
        found.setdefault((folder, 0), []).append(_joined(metrics))
    if order == "start":
        for segments in found.values():
            segments.sort(key=lambda s: (s.table["step"].min() or 0, s.table["step"].max() or 0))
    ordered = sorted(found, key=lambda key: (natural(key[0]), key[1]))
    if any(name == own for name, _ in found):
        own += " (no subfolder)" if root == Path(path) else " (no name)"
    return [Run(name, seed, tuple(found[name, seed]), name or own) for name, seed in ordered]


def rename_metrics(table: pl.DataFrame, told: Sequence[str] = ()) -> tuple[pl.DataFrame, list[str]]:
    """Give metrics our names: those told as ``ours=theirs``, then the usual ones of `ALIASES`.

    Returns:
        The table and what was renamed, in words.
    Raises:
        ValueError: an entry is not ``ours=theirs`` or names no column.
    """
    notes, wanted = [], {}
    for entry in told:
        ours, sep, theirs = entry.partition("=")
        if not sep or not ours or theirs not in table.columns:
            have = ", ".join(c for c in table.columns if c != "step")
            raise ValueError(f"metrics: expected ours=theirs with a column of the archive ({have}), got {entry!r}")
        wanted[theirs] = ours
    free = [c for c in table.columns if c not in wanted]
    for ours, names in ALIASES.items():
        if ours in table.columns or ours in wanted.values():
            continue
        last = {c: re.split(r"[/.]", c.lower())[-1].strip() for c in free}
        match = next((c for n in names for c in free if n in (c.lower(), last[c])), None)
        if match:
            wanted[match] = ours
    clash = {ours for theirs, ours in wanted.items() if ours in table.columns and ours != theirs}
    table = table.rename({c: f"{c} (archive)" for c in clash - set(wanted)}).rename(wanted)
    notes += [f"{theirs!r} is read as {ours}" for theirs, ours in wanted.items() if ours != theirs]
    return table, notes


def labelled(table: pl.DataFrame, told: Sequence[str], **keys: Any) -> tuple[pl.DataFrame, list[str]]:
    """Give a run's table our metric names, as `rename_metrics`, and `keys` as first columns, the same in every row.

    The archive's own columns of those names are called ``metric_<name>``.
    """
    import polars as pl

    table, notes = rename_metrics(table, told)
    table = table.rename({c: f"metric_{c}" for c in keys if c in table.columns})
    return table.select(*(pl.lit(v).alias(k) for k, v in keys.items()), pl.all()), notes


def natural(text: str) -> list[Any]:
    """Return a sort key by which ``run_2`` comes before ``run_10``."""
    return [int(t) if i % 2 else t for i, t in enumerate(re.split(r"([0-9]{1,18})", text))]


def _tag(stem: str) -> tuple[str, str]:
    """Return (segment, metric) of a one-metric file's name: TensorBoard writes ``<run>-tag-<metric>``."""
    segment, found, metric = stem.rpartition("-tag-")
    return (segment, metric) if found and metric else ("", stem)


def _scalar(raw: pl.DataFrame, metric: str, name: str, notes: list[str]) -> History:
    import polars as pl

    names = {c.strip().lower(): c for c in raw.columns}
    if not {"step", "value"} <= set(names):
        raise ValueError(f"history {name!r}: expected columns Step and Value, got {', '.join(raw.columns)}")
    if metric == "step":
        metric = "metric_step"
    kept = raw.select(pl.col(names["step"]).alias("step"), pl.col(names["value"]).alias(metric))
    return tidy(kept, name, step="step", notes=notes)


def _joined(metrics: dict[str, History]) -> History:
    """One segment from one-metric histories of the same run."""
    tables = list(metrics.values())
    table = tables[0].table
    for other in tables[1:]:
        table = table.join(other.table, on="step", how="full", coalesce=True)
    notes = [f"{m}: {note}" for m, h in metrics.items() for note in h.notes]
    joined = [f"joined {len(tables)} files of one metric each"] if len(tables) > 1 else []
    return History(tables[0].name, table.sort("step"), tuple(joined + notes))


def _split(raw: pl.DataFrame, stem: str, step: str | None) -> list[tuple[str, int, str, pl.DataFrame]]:
    """Return (run, seed, segment name, table) of each history in one file."""
    import polars as pl

    column = step_column(raw.columns, step)
    others = [c for c in raw.columns if c != column and c.strip()]
    panels = {c: m for c in others if (m := PANEL.fullmatch(c))}
    if column is not None and others and len(panels) == len(others):
        parts: dict[str, dict[str, str]] = {}
        for c, m in panels.items():
            if not m["band"] and m["metric"] != "_step":
                parts.setdefault(m["run"], {})[c] = m["metric"]
        if not parts:
            raise ValueError(f"history {stem!r}: expected a metric's own column, got only its __MIN, __MAX or _step")
        # A panel has a row wherever any run has one.
        has_row = {run: pl.any_horizontal(pl.col(*new).is_not_null()) for run, new in parts.items()}
        return [(run, 0, stem, raw.filter(has_row[run]).select(column, *new).rename(new)) for run, new in parts.items()]
    names = {c.strip().lower(): c for c in raw.columns}
    run = next((names[n] for n in RUN_COLUMNS if n in names and raw[names[n]].dtype == pl.String), None)
    keys = [k for k in (run, names.get("seed"), names.get("segment")) if k is not None]
    if not keys:
        return [("", 0, stem, raw)]
    out = []
    for values, part in raw.group_by(keys, maintain_order=True):
        told = dict(zip(keys, values))
        seed, segment = told.get(names.get("seed", ""), 0), told.get(names.get("segment", ""))
        name = stem if segment is None else f"segment {segment}"
        out.append((str((told[run] if run else "") or ""), _seed(seed), name, part.drop(keys)))
    return sorted(out, key=lambda o: natural(o[2])) if "segment" in names else out


def _seed(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
