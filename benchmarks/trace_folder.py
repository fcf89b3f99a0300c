"""How the analysis of a folder of ranks scales over processes, and what it holds in memory.

The ranks are made from this project's own recordings: copies one after the other, random start times, one slow rank.

    python benchmarks/trace_folder.py --ranks 512 --repeat 4 --processes 1 2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from workbench.core.record import load_recording
from workbench.experiments.tool_first_look import RECORDING
from workbench.traces.folder import analyse_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "traces"))
from rank_files import make_ranks

SOURCE = "long.json.gz"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=1, help="copies of the recording in each rank's trace")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--times", type=int, default=1, help="repeats of each measurement")
    options = parser.parse_args()
    source = load_recording("tool_first_look", RECORDING).file(SOURCE)
    with tempfile.TemporaryDirectory() as made:
        begun = time.perf_counter()
        paths = make_ranks([source], made, options.ranks, repeat=options.repeat, slow={options.ranks // 2: 1.3})
        size = sum(p.stat().st_size for p in paths)
        print(
            f"{len(paths)} ranks, {size / 2**20:.0f} MiB gzip, made in {time.perf_counter() - begun:.0f} s", flush=True
        )
        for processes in options.processes:
            seconds = []
            for _ in range(options.times):
                report = analyse_folder(made, processes=processes)
                seconds.append(report.seconds)
            row = {
                "processes": processes,
                "ranks": len(report.ranks),
                "operations": sum(r.operations for r in report.ranks),
                "seconds": round(statistics.median(seconds), 2),
                "ranks_per_s": round(len(report.ranks) / statistics.median(seconds), 1),
                "reader_peak_MiB": max(r.reader_peak_bytes for r in report.ranks) >> 20,
                "parent_peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                "slow_rank_found": options.ranks // 2 in {o["rank"] for o in report.outliers},
                "load": round(os.getloadavg()[0], 1),
            }
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
