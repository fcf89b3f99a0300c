"""The only writer of ``data/recorded``: a measurement with its provenance, written once, whole, never edited.

Every field of Appendix B.9 is written; null (or absent) says that it was not retained or does not apply, as with the
report's own records. Standard library only (torch lazily), so that a bare GPU machine can record.

Source: report, Appendix B.9.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.core.audit import environment, gpu_state
from workbench.core.files import new_folder
from workbench.core.scrub import leaks, scrub
from workbench.core.tables import MAIN, grouped, tables_of

SCHEMA = 1
# Fields of Appendix B.9 by group. Those with a star may not be null: no reader could use the numbers without them.
_FIELDS = {
    "provenance": "commit* dirty* date* seconds command* dependencies run_name",
    "workload": "params* seeds total_params active_params layers mixers experts top_k shared_experts capacity "
    "sequence_tokens global_batch_tokens",
    "topology": "nodes* gpus* dp cp ep_dp ep_mp pp vpp microbatch accumulation schedule",
    "precision": "parameter activation accumulation reduction optimizer communication cache checkpoint layout",
    "environment": "gpu gpus* driver cuda_toolkit compiler software* interpreter* cpu* links nics variables at_start* "
    "at_end*",
    "protocol": "timer* warmup* repeats* order l2 synchronization compile prewarm exclusions retries",
    "raw_outputs": "files* tables",
}
FIELDS = {group: tuple(names.replace("*", "").split()) for group, names in _FIELDS.items()}
REQUIRED = {group: tuple(n[:-1] for n in names.split() if n.endswith("*")) for group, names in _FIELDS.items()}
GROUPS = tuple(FIELDS)
DIGEST = "digest"
_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})_([a-z0-9]+)_([0-9a-f]{7}|nocommit)(-dirty)?(_\d{6})?")


def data_root() -> Path:
    """Return the folder that holds ``report/`` and ``recorded/`` (checkout, or the copy inside the wheel)."""
    override = os.environ.get("WORKBENCH_DATA")
    if override:
        return Path(override)
    here = Path(__file__).resolve().parents[1]
    checkout = here.parent / "data"
    return checkout if checkout.is_dir() else here / "_bundled" / "data"


def counted(names: Sequence[str]) -> str:
    """Return GPUs in one text, equal ones counted: ``2 x NVIDIA H200``; empty for none."""
    return " + ".join(f"{n} x {name}" if n > 1 else name for name, n in Counter(names).items())


class RecordChangedError(ValueError):
    """A recording that is not what was written: its ``record.json``, or a raw output."""


def record_digest(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of a record's content, its own ``digest`` left out.

    It covers values, not layout: keys are sorted and spaces dropped. The files have theirs in the record, so that this
    one number covers the whole recording.
    """
    content = {k: v for k, v in record.items() if k != DIGEST}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Recording:
    """A recording as read from disk (or, live, as just measured).

    Attributes:
        slug: experiment.
        name: folder name, ``<date>_<gpu>_<sha7>``; ``"live"`` for one that was not written.
        record: contents of ``record.json``.
        path: its folder, None when live.
    """

    slug: str
    name: str
    record: Mapping[str, Any]
    path: Path | None = None
    live_rows: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict, repr=False)

    @property
    def label(self) -> str:
        """Device, date and commit, for badges."""
        prov = self.record.get("provenance", {})
        commit = str(prov.get("commit") or "unknown")[:7] + ("+changes" if prov.get("dirty") else "")
        return f"{self.gpus or 'CPU'}, {prov.get('date', '')[:10]}, commit {commit}"

    @property
    def gpus(self) -> str:
        """GPUs that were used, not all of the host: ``NVIDIA H200``, ``2 x NVIDIA H200``; empty for none."""
        env, used = self.record.get("environment", {}), self.record.get("topology", {}).get("gpus")
        present = [g["name"] for g in env.get("gpus") or ()] or [env["gpu"]] * bool(env.get("gpu"))
        return counted(present[: 1 if used is None else used])

    def badge(self, source: str) -> str:
        """Return one line that says where the numbers come from; `source` is ``live`` or ``recorded``."""
        return ("measured live on " if source == "live" else "recorded on ") + self.label

    def tables(self) -> dict[str, Any]:
        """Return the tables as polars DataFrames by name, the main one first."""
        import polars as pl

        if self.path is None:
            return tables_of(self.live_rows)
        names = (self.record.get("raw_outputs") or {}).get("tables") or [MAIN]
        return {name: pl.read_csv(self.file(f"{name}.csv"), infer_schema_length=None) for name in names}

    def file(self, name: str) -> Path:
        """Return the path of one raw output.

        Raises:
            FileNotFoundError: the recording has no such file.
            RecordChangedError: its content is not what was recorded.
        """
        if self.path is None:
            raise FileNotFoundError(f"{self.slug}: a live result keeps no file {name!r}")
        path = self.path / name
        if not path.is_file():
            raise FileNotFoundError(f"recording {self.slug}/{self.name} has no file {name!r}")
        files = (self.record.get("raw_outputs") or {}).get("files") or {}  # a live one lists none
        told = files.get(name, {}).get("sha256")
        if told is not None and hashlib.sha256(path.read_bytes()).hexdigest() != told:
            raise RecordChangedError(
                f"recording {self.slug}/{self.name}: the SHA-256 of {name} is not the recorded one"
            )
        return path


def load_recording(slug: str, name: str) -> Recording:
    """Read one recording.

    One without a digest (measured by a version that wrote none) is read; `check_recording` names it.

    Raises:
        FileNotFoundError: it is not there; the message lists those that are.
        RecordChangedError: its ``record.json`` is not what was written, or no JSON object.
    """
    folder = data_root() / "recorded" / slug
    path = folder / name
    if not (path / "record.json").is_file():
        have = sorted(p.name for p in folder.glob("*/")) if folder.is_dir() else []
        raise FileNotFoundError(f"no recording {name!r} of {slug}; present: {', '.join(have) or 'none'}")
    try:
        record = _read(path)
    except RecordChangedError as error:
        raise RecordChangedError(f"recording {slug}/{name}: {error}") from error
    if DIGEST in record and (problems := _check_digest(record)):
        raise RecordChangedError(f"recording {slug}/{name}: {problems[0]}")
    return Recording(slug, name, record, path)


def _read(path: Path) -> dict[str, Any]:
    """Read ``record.json`` of a folder; a RecordChangedError where it is no JSON object."""
    try:
        record = json.loads((path / "record.json").read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RecordChangedError(f"record.json: expected JSON in UTF-8: {error}") from error
    if not isinstance(record, dict):
        raise RecordChangedError(f"record.json: expected an object, got {type(record).__name__}")
    return record


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


class Recorder:
    """Collects what one measurement produced and writes it as one folder.

    An experiment's `measure(params, recorder)` calls `row`/`samples`/`attach` and the group setters; whoever started
    it decides whether to `write`.
    """

    def __init__(self, slug: str, params: Mapping[str, Any], *, command: str | None = None) -> None:
        self.slug = slug
        self.started = datetime.datetime.now(datetime.UTC)
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.groups: dict[str, dict[str, Any]] = {g: {} for g in GROUPS}
        self.groups["workload"]["params"] = dict(params)
        self.command = command
        self._files: dict[str, bytes] = {}
        self._environment_start = environment()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of the table without another name, to be extended in place."""
        return self.tables.setdefault(MAIN, [])

    def row(self, table: str = MAIN, /, **values: Any) -> None:
        """Append one row of a tidy table; rows of another kind go to a table of another name.

        Raises:
            ValueError: the name is not a plain file name.
        """
        if table not in self.tables and not re.fullmatch(r"[a-z0-9][a-z0-9_]*", table):
            raise ValueError(f"table name {table!r}: expected lower-case letters, digits, '_'")
        self.tables.setdefault(table, []).append(values)

    def split(self, by: str) -> None:
        """Give the rows written so far a table for each value of the field `by`."""
        self.tables |= grouped(self.tables.pop(MAIN, []), by)

    def samples(self, name: str, values: Sequence[float]) -> None:
        """Keep raw repeats under `name` (summaries alone are not evidence)."""
        key = "samples.json"
        kept = json.loads(self._files[key]) if key in self._files else {}
        kept[name] = [float(v) for v in values]
        self._files[key] = json.dumps(kept).encode()

    def attach(self, name: str, content: bytes | str | Path) -> None:
        """Keep a raw output file (a trace, a log). Text is scrubbed, in ``.json`` inside its strings; bytes are not.

        Raises:
            ValueError: the name is not a plain file name, or text of a ``.json`` file is not JSON.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name == "record.json" or name.endswith(".csv"):
            raise ValueError(f"attachment name {name!r}: expected letters, digits, '.', '_', '-'")
        if isinstance(content, str):
            # Parsed first: cutting in raw JSON text could take an escape sequence in half.
            text = json.dumps(scrub(json.loads(content))) if name.endswith(".json") else scrub(content)
            self._files[name] = text.encode()
        else:
            self._files[name] = content.read_bytes() if isinstance(content, Path) else content

    def set(self, group: str, **values: Any) -> None:
        """Set fields of one of Appendix B.9's groups (workload, topology, precision, protocol, ...)."""
        if group not in self.groups:
            raise ValueError(f"unknown group {group!r}: expected one of {', '.join(GROUPS)}")
        self.groups[group].update(values)

    def live(self, *, keep: bool = False) -> Recording:
        """Return what was measured; `keep` also writes it, attachments too, to a folder that goes with the process."""
        if keep:
            folder = tempfile.TemporaryDirectory(prefix="workbench-live-")
            _KEPT.append(folder)
            return dataclasses.replace(self.live(), path=self.write(Path(folder.name)))
        return Recording(self.slug, "live", self._record(), None, {n: tuple(r) for n, r in self.tables.items() if r})

    def _record(self) -> dict[str, Any]:
        groups = {g: dict(v) for g, v in self.groups.items()}
        commit, dirty = tree_state()
        groups["provenance"] = {
            "commit": commit,
            "dirty": dirty,
            "date": self.started.isoformat(timespec="seconds"),
            "seconds": round((datetime.datetime.now(datetime.UTC) - self.started).total_seconds(), 3),
            "command": self.command or _command(),
        } | groups["provenance"]
        groups["environment"] = self._environment_start | {"at_end": gpu_state()} | groups["environment"]
        params = groups["workload"]["params"]
        seeds = [v for k, v in params.items() if k in ("seed", "seeds") or k.endswith("_seed")]
        groups["workload"] = {"seeds": seeds} | groups["workload"]
        groups["topology"] = {"nodes": 1, "gpus": 1 if groups["environment"].get("gpu") else 0} | groups["topology"]
        whole = {g: dict.fromkeys(FIELDS[g]) | groups[g] for g in GROUPS}
        return {"schema": SCHEMA, "slug": self.slug, **scrub(whole)}

    def write(self, root: Path | None = None) -> Path:
        """Write the recording as a new folder and return it; nothing is left half written.

        Raises:
            ValueError: no rows were recorded.
            FileExistsError: a recording of this name is already there (recordings are append-only).
        """
        tables = {f"{name}.csv": rows for name, rows in self.tables.items() if rows}
        if not tables:
            raise ValueError(f"{self.slug}: nothing to record, the table is empty")
        record = self._record()
        files = {name: _csv(rows) for name, rows in tables.items()} | self._files
        record["raw_outputs"]["tables"] = [name.removesuffix(".csv") for name in tables]
        record["raw_outputs"]["files"] = {
            n: {"sha256": hashlib.sha256(b).hexdigest(), "bytes": len(b)} for n, b in sorted(files.items())
        }
        gpu = re.sub(r"[^a-z0-9]+", "", (record["environment"].get("gpu") or "cpu").lower().replace("nvidia", ""))
        commit = (record["provenance"]["commit"] or "nocommit")[:7]
        name = f"{self.started:%Y-%m-%d}_{gpu}_{commit}{'-dirty' if record['provenance']['dirty'] else ''}"
        parent = (root or data_root() / "recorded") / self.slug
        parent.mkdir(parents=True, exist_ok=True)
        target = parent / name
        if target.exists():
            target = parent / f"{name}_{self.started:%H%M%S}"
        if target.exists():
            raise FileExistsError(f"recording {target.name} of {self.slug} exists; recordings are never overwritten")
        with new_folder(target) as folder:
            for n, b in files.items():
                (folder / n).write_bytes(b)
            # Of what a reader will parse: writing turns keys and foreign values into text.
            parsed = json.loads(json.dumps(record, allow_nan=False, default=str))
            text = json.dumps(parsed | {DIGEST: record_digest(parsed)}, indent=1)
            (folder / "record.json").write_text(text + "\n", encoding="utf-8")
        return target


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    columns = list(dict.fromkeys(k for r in rows for k in r))
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def tree_state() -> tuple[str | None, bool]:
    """Return (commit, dirty); a machine that gets an exported tree is told through WORKBENCH_COMMIT."""
    told = os.environ.get("WORKBENCH_COMMIT")
    if told:
        return told, os.environ.get("WORKBENCH_DIRTY", "0") != "0"
    here = Path(__file__).resolve().parent
    try:
        return _git(here, "rev-parse", "HEAD"), bool(_git(here, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None, True


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _command() -> str:
    """The command line without folders: paths of the machine are not recorded."""
    return " ".join(["python", *(Path(a).name if "/" in a else a for a in sys.argv)])


def check_recording(path: Path) -> list[str]:
    """Return what is wrong with one recording's folder, one line each; empty when nothing is.

    It compares names, schema, groups, required fields, the record's digest, every file's size and SHA-256, and looks
    for identifying text.
    """
    try:
        record = _read(path)
    except FileNotFoundError:
        return ["record.json is missing"]
    except OSError as error:
        return [f"record.json: cannot be read: {error.strerror or error}"]
    except RecordChangedError as error:
        return [str(error)]
    problems = _check_header(path, record) + _check_digest(record)
    for group in GROUPS:
        values = record.get(group)
        if not isinstance(values, dict):
            problems.append(f"{group}: expected an object, got {type(values).__name__}")
            continue
        problems += [f"{group}.{f}: expected a value, got none" for f in REQUIRED[group] if values.get(f) is None]
    return problems + _check_files(path, record) + [f"record.json: {line}" for line in leaks(record)]


def _check_header(path: Path, record: Mapping[str, Any]) -> list[str]:
    problems = []
    if record.get("schema") != SCHEMA:
        problems.append(f"schema: expected {SCHEMA}, got {record.get('schema')!r}")
    if record.get("slug") != path.parent.name:
        problems.append(f"slug: expected the folder's {path.parent.name!r}, got {record.get('slug')!r}")
    named = _NAME.fullmatch(path.name)
    provenance = record.get("provenance")
    if not named:
        return [*problems, f"folder name: expected <date>_<gpu>_<sha7>, got {path.name!r}"]
    if isinstance(provenance, dict):
        date, _, commit, dirty, _ = named.groups()
        for field_name, in_name, in_record in (
            ("date", date, str(provenance.get("date"))[:10]),
            ("commit", commit, str(provenance.get("commit") or "nocommit")[:7]),
            ("dirty", bool(dirty), provenance.get("dirty")),
        ):
            if in_name != in_record:
                problems.append(
                    f"provenance.{field_name}: the folder's name says {in_name!r}, the record {in_record!r}"
                )
    return problems


def _check_digest(record: Mapping[str, Any]) -> list[str]:
    told, found = record.get(DIGEST), record_digest(record)
    return [] if told == found else [f"record.json: expected the digest of its content, {found}, got {told!r}"]


def _check_files(path: Path, record: Mapping[str, Any]) -> list[str]:
    raw = record.get("raw_outputs")
    files = raw.get("files") if isinstance(raw, dict) else None
    if not isinstance(files, dict):
        return ["raw_outputs.files: expected an object of files"]
    tables = [f"{name}.csv" for name in raw.get("tables") or [MAIN]]  # type: ignore[union-attr]
    problems = [f"raw_outputs.files: {name} is not listed" for name in tables if name not in files]
    present = {p.name for p in path.iterdir()} - {"record.json"}
    problems += [f"{name} is not listed in raw_outputs.files" for name in sorted(present - set(files))]
    for name, entry in files.items():
        if name not in present:
            problems.append(f"{name} is missing")
            continue
        try:
            content = (path / name).read_bytes()
        except OSError as error:  # a folder or a broken link in its place
            problems.append(f"{name}: cannot be read: {error.strerror or error}")
            continue
        entry = entry if isinstance(entry, dict) else {}
        if entry.get("bytes") != len(content):
            problems.append(f"{name}: expected {entry.get('bytes')} bytes, got {len(content)}")
        if entry.get("sha256") != hashlib.sha256(content).hexdigest():
            problems.append(f"{name}: its SHA-256 is not the recorded one")
        if name in tables:
            lines = content.decode("utf-8", "replace").splitlines()
            problems += [f"{name} has no rows"] if len(lines) < 2 else []
            problems += [f"{name}: {line}" for line in sorted({x for text in lines for x in leaks(text)})]
    return problems
