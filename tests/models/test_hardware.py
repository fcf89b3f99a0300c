"""Nominal rates agree with what the report prints."""

from __future__ import annotations

import pytest

from workbench.core.report_tables import parse_printed, printed_rows
from workbench.models.hardware import GPUS, BF16_REFERENCE_TFLOPs, find_gpu


def test_b300_is_the_audited_gpu():
    audited = {r["quantity"]: r["value"] for r in printed_rows(45)}
    b300 = find_gpu("NVIDIA B300 SXM6 AC")
    assert b300.memory_MiB == int(audited["memory_per_gpu"])
    links = int(audited["nvlinks_per_gpu"]) * parse_printed(audited["nvlink_rate"]).value
    assert b300.nvlink_GBps == links == 956.25
    assert b300.bf16_TFLOPs == BF16_REFERENCE_TFLOPs == 2250


@pytest.mark.parametrize(
    "name, key", [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA-B200", "B200")]
)
def test_names_of_drivers_are_found(name, key):
    assert find_gpu(name) is GPUS[key]


@pytest.mark.parametrize("name", ["Tesla T4", "H2000", ""])
def test_unknown_gpu_raises(name):
    with pytest.raises(KeyError, match="no nominal rates"):
        find_gpu(name)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda g: g.name)
def test_fp8_is_twice_bf16(gpu):
    assert gpu.fp8_TFLOPs == pytest.approx(2 * gpu.bf16_TFLOPs, rel=1e-3)
