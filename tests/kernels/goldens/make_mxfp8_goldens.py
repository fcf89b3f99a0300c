"""Writes mxfp8_torchao.npz: inputs of our own and what torchao's `to_mx` makes of them.

Needs torchao (0.18 made the committed file), which the project itself does not depend on:
    python tests/kernels/goldens/make_mxfp8_goldens.py
"""

from pathlib import Path

import numpy as np
import torch


def blocks() -> dict[str, torch.Tensor]:
    """Return FP32 inputs [rows, 64] by name; every value of the BF16 goldens is the BF16 rounding of these."""
    rng = np.random.default_rng(20)
    spread = rng.standard_normal((64, 64)) * np.exp2(rng.integers(-60, 60, (64, 1)))
    sub = rng.standard_normal((16, 64)) * np.exp2(rng.integers(-148, -112, (16, 1)))
    top = rng.uniform(0.5, 1.0, (16, 64)) * 3.3e38
    edge = np.exp2(rng.integers(-40, 40, (48, 64)).astype(np.float64))
    edge[:16] *= 1 - 2.0**-24
    edge[16:32] *= 1.75
    edge[32:] *= 1.75 * (1 + 2.0**-22)
    saturating = np.tile(np.linspace(440, 512, 64), (4, 1)) * np.exp2(np.arange(4))[:, None]
    ties = np.tile((np.arange(64) + 0.5) / 8, (4, 1)) * np.exp2(np.arange(4) * 7 - 20)[:, None]
    zero = np.zeros((4, 64))
    zero[1, 3], zero[2, :] = -0.0, -0.0
    special = rng.standard_normal((8, 64))
    special[0, 5], special[1, 40], special[2, 0], special[3, 63] = np.nan, np.inf, -np.inf, np.nan
    special[4, :] = np.nan
    special[5, 1], special[5, 2] = np.inf, np.nan
    named = {
        "gaussian": spread,
        "subnormal": sub,
        "largest": top,
        "edge": edge,
        "saturating": saturating,
        "ties": ties,
        "zero": zero,
        "nonfinite": special,
    }
    return {name: torch.from_numpy(value.astype(np.float32)) for name, value in named.items()}


def main() -> None:
    """Write the archive beside this file."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    modes = {"floor": ScaleCalculationMode.FLOOR, "rceil": ScaleCalculationMode.RCEIL}
    arrays: dict[str, np.ndarray] = {}
    for name, x in blocks().items():
        arrays[f"{name}/input"] = x.view(torch.int32).numpy()
        for label, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            for rounding, mode in modes.items():
                scales, payload = to_mx(x.to(dtype), torch.float8_e4m3fn, 32, mode)
                arrays[f"{name}/{label}/{rounding}/scales"] = scales.view(torch.uint8).numpy()
                arrays[f"{name}/{label}/{rounding}/payload"] = payload.view(torch.uint8).numpy()
    np.savez_compressed(Path(__file__).with_name("mxfp8_torchao.npz"), **arrays)


if __name__ == "__main__":
    main()
