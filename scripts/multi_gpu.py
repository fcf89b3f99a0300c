"""Measure the routed paths on this host's GPUs, one rank each, and write a recording and the ranks' traces.

python scripts/multi_gpu.py --out out/multi_gpu --restarts 5
python scripts/multi_gpu.py --out out/cpu --ranks 2 --backend gloo --small     # the same on CPU ranks, no recording
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from workbench.measure.multi_gpu import Options, run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows, traces and the recording")
    parser.add_argument("--ranks", type=int, default=0, help="default: one per GPU")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU runs in seconds")
    parser.add_argument("--sequence", type=int, nargs="+", default=[1024, 2048, 8192], help="tokens per sequence")
    parser.add_argument("--layer-tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="per rank")
    parser.add_argument("--grouped-gemm", default="triton", choices=("triton", "torch"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=5, help="process starts; later ones time whole steps only")
    a = parser.parse_args()
    if a.backend == "gloo":
        options = Options(out=str(a.out), backend=a.backend, small=a.small, repeats=a.repeats)
        rows = run(options, a.ranks, a.restarts)
        (a.out / "rows.json").write_text(json.dumps(rows))
        return 0
    from workbench.experiments.op_expert_parallel import EXPERIMENT, ExpertParallelParams, measure
    from workbench.record import Recorder

    params = ExpertParallelParams(
        ranks=a.ranks, sequence=tuple(a.sequence), layer_tokens=tuple(a.layer_tokens),
        grouped_gemm=a.grouped_gemm, repeats=a.repeats, restarts=a.restarts,
        folder=str(a.out),
    )  # fmt: skip
    recorder = Recorder(EXPERIMENT.slug, params.as_dict())
    measure(params, recorder)
    print(recorder.write(a.out / "recorded").name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
