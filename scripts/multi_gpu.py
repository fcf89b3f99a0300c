"""Measure the routed paths on this host's GPUs, one rank each: the recordings of every several-GPU experiment.

python scripts/multi_gpu.py --out out/multi_gpu
python scripts/multi_gpu.py --out out/multi_gpu --only op_expert_parallel --ranks 4
python scripts/multi_gpu.py --out out/cpu --ranks 2 --backend gloo     # every section on CPU ranks, no recording
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

CPU_RANKS = 64  # each is a process that imports torch: more are a typing error
SLUGS = ("fig74_submission_regimes_ep", "op_expert_parallel", "fig32_critical_microbatch_ep")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the recordings, or the CPU ranks' rows")
    parser.add_argument("--ranks", type=int, default=0, help=f"default: one per GPU; with gloo 1 to {CPU_RANKS}")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--only", nargs="+", choices=SLUGS, default=SLUGS, help="experiments to record")
    parser.add_argument("--processes", type=int, default=5, help="process starts over which step times are repeated")
    a = parser.parse_args()
    if a.backend == "gloo":
        if not 1 <= a.ranks <= CPU_RANKS:
            parser.error(f"--ranks: expected 1 to {CPU_RANKS} with --backend gloo, got {a.ranks}")
        from workbench.measure.multi_gpu import SECTIONS, Options, run

        options = Options(out=str(a.out), sections=tuple(SECTIONS), backend="gloo", small=True, repeats=2)
        rows = run(options, a.ranks)
        (a.out / "rows.json").write_text(json.dumps(rows))
        return 0
    from workbench.core.record import Recorder
    from workbench.experiments import load

    # A run that is stopped leaves there what its ranks had written; a finished one clears it away.
    unfinished = a.out / "unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(unfinished)
    for slug in a.only:
        began, experiment = time.monotonic(), load(slug)
        chosen = {"ranks": a.ranks} | ({"processes": a.processes} if slug == SLUGS[0] else {})
        params = experiment.params(**chosen)
        recorder = Recorder(slug, params.as_dict())
        assert experiment.measure is not None
        experiment.measure(params, recorder)
        print(recorder.write(a.out).name, slug, f"{time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
