"""Nominal rates of the GPUs that the report and this project speak of: pure numbers, no device is asked.

Source: vendor datasheets (H100 SXM, H200 SXM, HGX B200, HGX B300: dense rates, without 2:4 sparsity); report, Table 45
and Equation 95 for the B300's memory, links and BF16 reference.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16_REFERENCE_TFLOPs = 2250.0
"""Dense BF16 peak per B300 that Equation 95 divides by, for every row, MXFP8 runs included."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Nominal rates of one GPU.

    Attributes:
        name: as `nvidia-smi` shortens it.
        bf16_TFLOPs: dense BF16 matrix peak.
        fp8_TFLOPs: dense FP8 matrix peak.
        hbm_GBps: memory bandwidth, 1e9 bytes/s.
        memory_MiB: device memory that the driver reports; the datasheet's where no report is known.
        nvlink_GBps: NVLink bandwidth per direction, all links together.
        sms: streaming multiprocessors.
        l2_MiB: level-2 cache.
    """

    name: str
    bf16_TFLOPs: float
    fp8_TFLOPs: float
    hbm_GBps: float
    memory_MiB: int
    nvlink_GBps: float
    sms: int
    l2_MiB: int


GPUS: dict[str, Gpu] = {
    g.name: g
    for g in (
        Gpu(
            name="H100",
            bf16_TFLOPs=989.4,
            fp8_TFLOPs=1978.9,
            hbm_GBps=3350,
            memory_MiB=81559,
            nvlink_GBps=450,
            sms=132,
            l2_MiB=50,
        ),
        Gpu(
            name="H200",
            bf16_TFLOPs=989.4,
            fp8_TFLOPs=1978.9,
            hbm_GBps=4800,
            memory_MiB=143771,
            nvlink_GBps=450,
            sms=132,
            l2_MiB=50,
        ),
        Gpu(
            name="B200",
            bf16_TFLOPs=2250,
            fp8_TFLOPs=4500,
            hbm_GBps=8000,
            memory_MiB=183359,
            nvlink_GBps=900,
            sms=148,
            l2_MiB=126,
        ),
        Gpu(
            name="B300",
            bf16_TFLOPs=2250,
            fp8_TFLOPs=4500,
            hbm_GBps=8000,
            memory_MiB=275040,
            nvlink_GBps=956.25,
            sms=148,
            l2_MiB=126,
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU whose short name occurs in `name`, e.g. ``"NVIDIA B300 SXM6 AC"``.

    Raises:
        KeyError: none does; the message lists the known names.
    """
    words = name.upper().replace("-", " ").split()
    for key, gpu in GPUS.items():
        if key in words:
            return gpu
    raise KeyError(f"no nominal rates for GPU {name!r}; known: {', '.join(GPUS)}")
