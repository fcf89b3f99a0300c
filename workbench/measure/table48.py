"""Times of MXFP8 expert products against BF16, one process: the protocol of Table 48 and an honest one beside it.

Standard library, torch and triton only.

Source: report, Appendix B.6, Table 48.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.measure import timing, unstable

PREQUANTIZED, INCLUDING_Q = "prequantized", "including_q"
EAGER_WARMUP_MS, EAGER_WINDOW_MS = 25, 100
GRAPH_COPIES, GRAPH_WARMUP, GRAPH_REPEATS = 32, 3, 5
ROTATING_SETS = 3
VISITS = 2
"""How often a process takes each variant of the table's rows, forwards and then backwards: the device slows down as it
warms, which must not decide a ratio."""
BASELINE = "bf16_grouped"
SWEPT = (BASELINE, "ours", "multi_launch")
RESTARTED = (*SWEPT, "ours_canonical", "torch_fp8_fast")
"""Variants of the swept rows, and those timed in every process; the first process times all on the table's rows."""
WRONG = 2.5e-3
"""Relative error against FP64 from which a result counts as wrong: a BF16 output costs 1.7e-3, and sums left to the
tensor core 2.0e-3 in all."""


def calls(
    M: int, *, experts: int, k: int, n: int, seed: int, weights: int = 1
) -> dict[tuple[str, str], list[Callable[[], Any]]]:
    """Return, by (variant, input), the same work on each of `weights` weight sets. Groups are balanced.

    The prequantised input of `ours` was folded by our quantiser beforehand; `ours_canonical` starts from canonical
    MX scales and
    folds inside the timed region.
    """
    import torch
    from moe_kernels import mxfp8
    from moe_kernels.mxfp8 import linear, reference

    scaled_grouped_mm = unstable.scaled_grouped_mm()
    if M % experts:
        raise ValueError(f"rows M must be a multiple of the {experts} experts for balanced groups; got {M}")
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(M, k, device="cuda", generator=g).bfloat16()
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (M // experts)
    canonical, folded = mxfp8.quantize(x), mxfp8.quantize(x, target="folded")
    a_scale = reference.scale_value(folded.row_scale).float()
    out = torch.empty(M, n, device="cuda", dtype=torch.bfloat16)
    scratch = mxfp8.Folded(torch.empty_like(folded.payload), torch.empty_like(folded.row_scale))
    mx = mxfp8.MX(torch.empty_like(canonical.payload), torch.empty_like(canonical.scales))
    found: dict[tuple[str, str], list[Callable[[], Any]]] = {}

    def add(variant: str, source: str, call: Callable[[], Any]) -> None:
        found.setdefault((variant, source), []).append(call)

    for _ in range(weights):
        w = (torch.randn(experts, n, k, device="cuda", generator=g) * k**-0.5).bfloat16()
        w_t = w.transpose(1, 2)
        q = linear.QuantizedWeight(w).forward
        q_t, w_scale = q.payload.transpose(1, 2), reference.scale_value(q.row_scale).float()

        def torch_fp8(rows=folded.payload, scale=a_scale, q_t=q_t, w_scale=w_scale, fast=True):
            return scaled_grouped_mm(
                rows, q_t, scale, w_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        def separate(quantise: bool, fp8=torch_fp8):
            source = mxfp8.quantize(x, impl="triton", out=(mx.payload, mx.scales)) if quantise else canonical
            rows, scale = mxfp8.fold(source, impl="triton", out=(scratch.payload, scratch.row_scale))
            return fp8(rows, (scale.to(torch.int32) << 23).view(torch.float32))

        def loop(w_t=w_t):
            step = M // experts
            for e in range(experts):
                torch.mm(x[e * step : (e + 1) * step], w_t[e], out=out[e * step : (e + 1) * step])
            return out

        for source in (PREQUANTIZED, INCLUDING_Q):
            add(BASELINE, source, lambda w_t=w_t: torch.nn.functional.grouped_mm(x, w_t, offs=ends))
            add("bf16_expert_loop", source, loop)
            rows = folded if source == PREQUANTIZED else x
            options: dict[str, Any]
            for name, options in (("ours", {}), ("ours_fast", {"accumulate": "fast"})):
                add(
                    name,
                    source,
                    lambda rows=rows, q=q, options=options: mxfp8.grouped_gemm(
                        rows, q, ends, out=out, scratch=scratch, **options
                    ),
                )
            ready = mxfp8.prepare(rows, q, ends, out, scratch=scratch)
            add("ours_prepared", source, ready)
            add("multi_launch", source, lambda source=source, separate=separate: separate(source == INCLUDING_Q))
        add(
            "ours_canonical", PREQUANTIZED, lambda q=q: mxfp8.grouped_gemm(canonical, q, ends, out=out, scratch=scratch)
        )
        add("torch_fp8_fast", PREQUANTIZED, torch_fp8)
        add("torch_fp8", PREQUANTIZED, lambda torch_fp8=torch_fp8: torch_fp8(fast=False))
    return found


def expected(M: int, *, experts: int, k: int, n: int, seed: int) -> dict[str, Any]:
    """Return what the calls of the same arguments must give for the first weight set, [M, n] FP64: the product of the
    BF16 values ("bf16") and of the quantised and folded ones ("mxfp8")."""
    import torch
    from moe_kernels.mxfp8 import linear, reference

    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(M, k, device="cuda", generator=g).bfloat16()
    w = (torch.randn(experts, n, k, device="cuda", generator=g) * k**-0.5).bfloat16()
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (M // experts)
    rows = reference.fold(*reference.quantize(x))[:2]
    weights = linear.QuantizedWeight(w, impl="reference").forward
    return {
        "bf16": reference.grouped_gemm(x, w, ends),
        "mxfp8": reference.grouped_gemm(reference.dequantize(*rows), reference.dequantize(*weights), ends),
    }


def error_of(call: Callable[[], Any], want: Any) -> float:
    """Return |result - want| / |want| of one call; a call that leaves its output unwritten gives NaN."""
    out = call()
    out.fill_(float("nan"))
    return float((call().double() - want).norm() / want.norm())


def eager_us(call: Callable[[], Any]) -> list[float]:
    """Return every repeat of Triton's do_bench, which flushes the L2 and records an event on each side of the call."""
    from triton.testing import do_bench

    times_ms: Any = do_bench(call, warmup=EAGER_WARMUP_MS, rep=EAGER_WINDOW_MS, return_mode="all")
    return [round(t * 1e3, 2) for t in times_ms]


def graph_us(calls_in_turn: list[Callable[[], Any]]) -> list[float]:
    """Return device time per call of each timed replay of the captured copies."""
    return timing.graph_us(calls_in_turn, copies=GRAPH_COPIES, repeats=GRAPH_REPEATS, warmup=GRAPH_WARMUP)


def ceilings() -> dict[str, float]:
    """Return this device's copy bandwidth and its BF16 and FP8 rates on an 8192 cube of random data."""
    import torch

    side, scaled_mm = 8192, unstable.scaled_mm()
    a, b = (torch.randn(side, side, device="cuda").bfloat16() for _ in range(2))
    one = torch.ones((), device="cuda")
    fa, fb = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    flop = 2 * side**3
    bf16 = timing.percentile(timing.eager_device_us(lambda: a @ b, repeats=10), 0.5)
    fp8 = timing.percentile(
        timing.eager_device_us(
            lambda: scaled_mm(fa, fb, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True),
            repeats=10,
        ),
        0.5,
    )
    return {
        "copy_GBps": round(timing.copy_bandwidth_GBps(), 1),
        "bf16_TFLOPs": round(flop / bf16 / 1e6, 1),
        "fp8_TFLOPs": round(flop / fp8 / 1e6, 1),
    }


def measure_process(request: dict[str, Any]) -> dict[str, Any]:
    """Measure every size of `request` in this process, variants interleaved, and return raw samples.

    Every variant's result is compared with FP64 first; one that is wrong, or raises, is named in `failures` and not
    timed.

    Args:
        request: rows_M, swept_M, experts, k, n, seed, honest (whether the columns beside the protocol are taken), and
            reverse (1 takes the variants from the last to the first).
    """
    import torch

    sizes = [(M, False) for M in request["rows_M"]] + [(M, True) for M in request["swept_M"]]
    shape = {key: request[key] for key in ("experts", "k", "n", "seed")}
    out: dict[str, Any] = {"ceilings": ceilings() if request["honest"] else None, "samples": [], "failures": []}
    for M, swept in sizes:
        found = calls(M, **shape)
        wanted = SWEPT if swept else None if request["honest"] else RESTARTED
        names = [key for key in found if wanted is None or key[0] in wanted]
        # The baseline is one piece of work: it is timed once and stands beside both inputs.
        names = [key for key in names if not (key[0] in (BASELINE, "bf16_expert_loop") and key[1] == INCLUDING_Q)]
        want = expected(M, **shape)
        errors: dict[tuple[str, str], float] = {}
        for key in names:
            try:
                errors[key] = error_of(found[key][0], want["bf16" if key[0].startswith("bf16") else "mxfp8"])
            except Exception as error:  # one variant must not take the others' measurements with it
                out["failures"].append(f"{M} {key}: {error!r}; not timed"[:500])
                continue
            if not errors[key] < WRONG:
                out["failures"].append(f"{M} {key}: wrong, relative error {errors[key]:.2e}; not timed")
        del want
        names = [key for key in names if errors.get(key, WRONG) < WRONG]
        samples = {key: {"eager": [], "graph": []} for key in names}
        for turn in range(1 if swept else VISITS):
            order = names[::-1] if (turn + request["reverse"]) % 2 else names
            for key in order:
                if turn and key[0] not in RESTARTED:
                    continue
                try:
                    samples[key]["eager"].append(eager_us(found[key][0]))
                    samples[key]["graph"].append(graph_us(found[key]))
                except Exception as error:
                    out["failures"].append(f"{M} {key}: {error!r}"[:500])
        honest: dict[tuple[str, str], dict[str, Any]] = {key: {} for key in names}
        if request["honest"] and not swept:
            rotating = calls(M, **shape, weights=ROTATING_SETS)
            for key in names:
                try:
                    honest[key] = {
                        "submit_us": timing.submit_us(found[key][0], repeats=50, warmup=5),
                        "back_to_back_us": timing.wall_us(found[key][0], repeats=6, warmup=5, batch=20),
                        "rotating_us": graph_us(rotating[key]),
                        "launches": timing.launches(found[key][0]),
                    }
                except Exception as error:
                    out["failures"].append(f"{M} {key} honest: {error!r}"[:500])
            del rotating
        out["samples"] += [
            {"M": M, "variant": v, "input": s, "swept": swept, "error": errors[v, s], **samples[v, s], **honest[v, s]}
            for v, s in names
            if samples[v, s]["graph"]
        ]
        del found
        torch.cuda.empty_cache()
    return out
