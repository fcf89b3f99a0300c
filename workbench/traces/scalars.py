"""What single values of a Kineto event mean: ids, labels, direction and memory of a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.traces.trace import D2D, D2H, H2D, OTHER_COPY, PAGEABLE, PINNED, UNKNOWN_MEMORY


def number(value: Any) -> Any:
    """A process or thread id: digits in a string are the number."""
    return int(value) if isinstance(value, str) and len(value) < 20 and value.isdecimal() else value


def label(value: Any) -> int | str:
    """Label of a process or thread: a number or text."""
    if isinstance(value, (int, str)):
        return value
    return str(value)


def int32(values: np.ndarray) -> np.ndarray:
    """As int32, clipped to its range."""
    return values.clip(-(1 << 31), (1 << 31) - 1).astype(np.int32)


def copy_kind(text: str) -> int:
    """Direction of a copy from its name and kind."""
    text = text.replace(" ", "")
    if "DtoH" in text or "DeviceToHost" in text:
        return D2H
    if "HtoD" in text or "HostToDevice" in text:
        return H2D
    if "DtoD" in text or "DeviceToDevice" in text:
        return D2D
    return OTHER_COPY


def host_memory(name: str) -> int:
    """Memory of a copy on the host, from its name."""
    if "Pageable" in name:
        return PAGEABLE
    return PINNED if "Pinned" in name else UNKNOWN_MEMORY
