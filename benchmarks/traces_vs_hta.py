"""Time and peak memory: our load + full analysis against HolisticTraceAnalysis's load + idle and queue analysis.

Both run on the same traces, one after the other in fresh processes, `--repeats` times interleaved. The fastest
repeat of each is compared (a shared machine only ever adds time), and processor time beside it.
Imports are not timed (ours are far shorter); peak memory is the process's whole resident peak, imports included.

    python -m venv /tmp/hta_venv && /tmp/hta_venv/bin/pip install HolisticTraceAnalysis
    python benchmarks/traces_vs_hta.py --hta-python /tmp/hta_venv/bin/python

Traces: the shared real ones where they are present, and a large one made by repeating a recording of ours.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("nccl_training", "a100_eager_60_syncs", "v100_cuda_graphs", "v100_ns_resolution")

# A process that was just started counts its parent's resident peak as its own (ru_maxrss); the kernel's VmHWM does not.
PEAK = """
def peak_MiB():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024
"""

OURS = """
import json, sys, time
import numpy, workbench.traces.kineto, workbench.models.submission
from workbench.traces import read
from workbench.traces.idle import Analysis
from workbench.traces.summary import summarise
from workbench.traces.verify import verify_trace
from workbench.traces.ranges import table51
begin, cpu = time.perf_counter(), time.process_time()
analysis = Analysis(read(sys.argv[1]))
loaded = time.perf_counter()
summary = summarise(analysis)
verify_trace(analysis)
table51(analysis)
end = time.perf_counter()
print("RESULT" + json.dumps({"seconds": end - begin, "load_seconds": loaded - begin,
    "cpu_seconds": time.process_time() - cpu,
    "peak_MiB": peak_MiB(),
    "ops": len(analysis.trace.ops), "idle_us": sum(d["idle_ns"] for d in summary["devices"]) / 1e3}))
"""

HTA = """
import json, logging, os, resource, sys, time
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
begin, cpu = time.perf_counter(), sum(os.times()[:4])
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=os.path.dirname(sys.argv[1]))
loaded = time.perf_counter()
idle = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
analysis.get_queue_length_summary(ranks=[0])
analysis.get_queue_length_time_series(ranks=[0])
end = time.perf_counter()
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print("RESULT" + json.dumps({"seconds": end - begin, "load_seconds": loaded - begin,
    "cpu_seconds": sum(os.times()[:4]) - cpu, "peak_MiB": max(peak_MiB(), children)}))
"""


def run(python: str, code: str, trace: Path) -> dict[str, float]:
    """One measurement in a fresh process; `error` where it failed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-c", PEAK + code, str(trace)], capture_output=True, text=True, env=env, cwd="/")
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return json.loads(line[6:])
    return {"error": (done.stderr or done.stdout).strip().splitlines()[-1:]}  # type: ignore[dict-item]


def repeated(source: Path, target: Path, megabytes: int) -> None:
    """Write a trace of about `megabytes` MB: the source's events again and again, times and ids shifted.

    Written with our own text, so that the digits of the times stay exact.
    """
    opener = gzip.open if source.name.endswith(".gz") else open
    with opener(source, "rt") as f:
        trace = json.load(f)
    events = [e for e in trace["traceEvents"] if "ts" in e]
    low = min(e["ts"] for e in events)
    span = max(e["ts"] + e.get("dur", 0) for e in events) - low + 100
    ids = ("correlation", "External id")
    step_id = 1 + max(e.get("args", {}).get("correlation", 0) for e in events)
    with target.open("w") as out:
        out.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [\n')
        again = 0
        while out.tell() < megabytes * 1_000_000:
            for e in events:
                copy = {**e, "ts": round(e["ts"] - low + again * span, 3)}
                if e.get("ph") in ("s", "f") and isinstance(e.get("id"), int):
                    copy["id"] = e["id"] + again * step_id
                if "args" in e:
                    copy["args"] = {
                        k: v + again * step_id if k in ids and isinstance(v, int) else v for k, v in e["args"].items()
                    }
                if str(e.get("name", "")).startswith("ProfilerStep#"):
                    copy["name"] = f"ProfilerStep#{again * 100 + int(e['name'].split('#')[1])}"
                out.write(json.dumps(copy) + ",\n")
            again += 1
        out.write('{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}}]}')


def main() -> int:
    """Run the comparison and print JSON; exit 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hta-python", default=os.environ.get("HTA_PYTHON", "/tmp/hta_venv/bin/python"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the repeated trace; 0 leaves it out")
    parser.add_argument("traces", nargs="*", type=Path)
    args = parser.parse_args()
    shared = Path(os.environ.get("WORKBENCH_SHARED", ROOT.parent / "shared")) / "traces"
    traces = args.traces or [p for n in SHARED if (p := shared / f"{n}.json.gz").is_file()]
    have_hta = Path(args.hta_python).is_file()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        recording = sorted(ROOT.glob("data/recorded/tool_first_look/*/long.json.gz"))
        if args.megabytes and recording and not args.traces:
            big = Path(folder) / f"repeated_{args.megabytes}MB.json"
            repeated(recording[-1], big, args.megabytes)
            traces = [*traces, big]
        for trace in traces:
            ours, theirs = [], []
            for _ in range(args.repeats if trace.stat().st_size < 50e6 else 1):
                ours.append(run(sys.executable, OURS, trace.resolve()))
                if have_hta:
                    theirs.append(run(args.hta_python, HTA, trace.resolve()))
            rows.append(_row(trace.name, ours, theirs))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    missed = [r["trace"] for r in rows if r.get("faster", 5) < 5 or r.get("memory_share", 0) > 1 / 3]
    note = None if have_hta else f"HolisticTraceAnalysis is not installed at {args.hta_python}: ours alone"
    print(json.dumps({"schema": 1, "rows": rows, "missed_targets": missed, "note": note}, indent=1))
    return 1 if missed else 0


def _row(name: str, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, object]:
    def best(rows: list[dict[str, float]], key: str) -> float | None:
        return min((r[key] for r in rows if key in r), default=None)

    row: dict[str, object] = {"trace": name, "ops": best(ours, "ops")}
    for who, rows in (("ours", ours), ("hta", theirs)):
        for key in ("seconds", "load_seconds", "cpu_seconds", "peak_MiB"):
            row[f"{who}_{key}"] = best(rows, key)
        errors = [r["error"] for r in rows if "error" in r]
        if errors:
            row[f"{who}_error"] = errors[0]
    if row["hta_seconds"] and row["ours_seconds"]:
        row["faster"] = row["hta_seconds"] / row["ours_seconds"]  # type: ignore[operator]
        row["cpu_faster"] = row["hta_cpu_seconds"] / row["ours_cpu_seconds"]  # type: ignore[operator]
        row["memory_share"] = row["ours_peak_MiB"] / row["hta_peak_MiB"]  # type: ignore[operator]
    return row


if __name__ == "__main__":
    raise SystemExit(main())
