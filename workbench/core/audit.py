"""Which machine and software is this? The report's Table 45 for one's own machine.

Standard library; torch only where it is installed, and without creating a CUDA context. No secrets, host names, user
names, paths or addresses leave this module: every answer passes `workbench.core.scrub.scrub`.

Source: report, Table 45, Section B.1 and the environment group of Section B.9.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core.scrub import scrub

_PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nvshmem": ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
    "nvshmem4py": ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "torchao": ("torchao",),
    "numpy": ("numpy",),
}
# Variables that change how a step runs. Names are listed one by one: a prefix would also catch tokens and paths.
_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG", "NCCL_IB_DISABLE",
    "NCCL_IB_HCA", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP",
    "NVSHMEM_DISABLE_CUDA_VMM", "NVSHMEM_HCA_LIST", "NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_SYMMETRIC_SIZE",
    "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_NCCL_AVOID_RECORD_STREAMS", "TRITON_INTERPRET",
)  # fmt: skip
_STATIC = {
    "name": "name", "memory_MiB": "memory.total", "compute_capability": "compute_cap", "driver": "driver_version",
    "sm_clock_max_MHz": "clocks.max.sm", "memory_clock_max_MHz": "clocks.max.memory", "power_limit_W": "power.limit",
    "power_default_limit_W": "power.default_limit", "persistence_mode": "persistence_mode",
    "compute_mode": "compute_mode", "mig_mode": "mig.mode.current", "ecc_mode": "ecc.mode.current",
    "pcie_generation": "pcie.link.gen.current", "pcie_width": "pcie.link.width.current",
}  # fmt: skip
_STATE = {
    "sm_clock_MHz": "clocks.sm", "memory_clock_MHz": "clocks.mem", "power_W": "power.draw",
    "temperature_C": "temperature.gpu", "utilization_pct": "utilization.gpu", "memory_used_MiB": "memory.used",
    "performance_state": "pstate", "clock_limit_reasons": "clocks_throttle_reasons.active",
}  # fmt: skip


def _run(*command: str, timeout_s: float = 20.0) -> str:
    """Return standard output, empty where the tool is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, errors="replace", check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _value(text: str) -> Any:
    """Number, text or None for nvidia-smi's ``[N/A]``, ``[Not Supported]``."""
    text = text.strip()
    if not text or text.startswith("[") or text in ("N/A", "Unknown Error"):
        return None
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _query(fields: Mapping[str, str]) -> list[dict[str, Any]]:
    """Ask nvidia-smi for `fields` of every GPU; one unknown field must not lose the others."""
    flags = ("--format=csv,noheader,nounits",)
    text = _run("nvidia-smi", f"--query-gpu={','.join(fields.values())}", *flags)
    if text:
        rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
        return [{k: _value(v) for k, v in zip(fields, row, strict=True)} for row in rows if len(row) == len(fields)]
    if not _run("nvidia-smi", "-L"):
        return []
    ask = lambda q: _run("nvidia-smi", f"--query-gpu={q}", *flags).splitlines()  # noqa: E731
    columns = {k: [_value(v) for v in ask(q)] for k, q in fields.items()}
    count = max((len(v) for v in columns.values()), default=0)
    return [{k: v[i] if i < len(v) else None for k, v in columns.items()} for i in range(count)]


def gpu_state() -> dict[str, Any]:
    """Clocks, power and temperature of the GPUs now: ``{"gpus": [...]}``, an empty list without a GPU.

    Units are in the names. `clock_limit_reasons` is the driver's bit mask as text; ``0x0000000000000000`` is no limit.
    """
    return {"gpus": _query(_STATE)}


def _gpus() -> list[dict[str, Any]]:
    rows = _query(_STATIC)
    for row in rows:
        row |= {k: row[k] and str(row[k]) for k in ("compute_capability", "driver")}
    return rows or _gpus_by_torch()


def _gpus_by_torch() -> list[dict[str, Any]]:
    """Fallback for containers without nvidia-smi; None for what torch does not know."""
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        known = {"name": p.name, "memory_MiB": p.total_memory // 2**20, "compute_capability": f"{p.major}.{p.minor}"}
        found.append({k: known.get(k) for k in _STATIC})
    return found


def _torch() -> Any:
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch


def _links() -> dict[str, Any]:
    """NVLinks of GPU 0 with their rate, and how each pair of GPUs is connected (NV18, PIX, NODE, SYS, ...)."""
    rates = [float(x) for x in re.findall(r"Link \d+: ([\d.]+) GB/s", _run("nvidia-smi", "nvlink", "-s", "-i", "0"))]
    rows = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in _run("nvidia-smi", "topo", "-m").splitlines()]
    gpus = [r for r in rows if r and re.fullmatch(r"GPU\d+", r[0]) and "X" in r]
    pairs: dict[str, int] = {}
    for i, row in enumerate(gpus):
        for kind in row[i + 2 : len(gpus) + 1]:
            pairs[kind] = pairs.get(kind, 0) + 1
    return {
        "nvlinks_per_gpu": len(rates) or None,
        "nvlink_GBps_per_link": rates[0] if rates and len(set(rates)) == 1 else (rates or None),
        "gpu_pairs": pairs,
    }


def _nics() -> list[dict[str, Any]]:
    """InfiniBand/RoCE ports, then other physical interfaces: device, kind, state and rate; no addresses."""
    found = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        entry: dict[str, Any] = {"device": port.parent.parent.name, "kind": _read(f"{port}/link_layer") or "InfiniBand"}
        entry["state"] = _read(f"{port}/state").split(": ")[-1] or None
        found.append(entry | {"rate": _read(f"{port}/rate") or None})
    for net in sorted(Path("/sys/class/net").glob("*")):
        if not (net / "device").exists():
            continue
        speed = _value(_read(f"{net}/speed"))
        rate = f"{speed} Mb/s" if isinstance(speed, int) and speed > 0 else None
        found.append({"device": net.name, "kind": "Ethernet", "state": _read(f"{net}/operstate") or None, "rate": rate})
    return found


def _storage_type(folder: Path) -> str | None:
    """File-system type that holds `folder` (ext4, overlay, wekafs, nfs4, ...)."""
    target, best = str(folder.resolve()), ("", None)
    for line in _read("/proc/mounts").splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        mount = parts[1].replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, parts[2])
    return best[1]


def cpu() -> dict[str, Any]:
    """Return processor, cores, governor and memory in MiB, as plain JSON values."""
    info = _read("/proc/cpuinfo")
    model = re.search(r"^(?:model name|Processor)\s*:\s*(.+)$", info, re.M)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.M)
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "model": model.group(1) if model else platform.processor() or platform.machine() or None,
        "architecture": platform.machine(),
        "logical_cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or None,
        "virtual_machine": bool(re.search(r"^flags\s*:.*\bhypervisor\b", info, re.M)) if info else None,
        "memory_MiB": int(memory.group(1)) // 1024 if memory else None,
    }


def _version_of(names: tuple[str, ...]) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _toolkit() -> dict[str, Any]:
    """CUDA toolkit and C++ compiler; says when nvcc is installed but not on PATH."""
    nvcc = shutil.which("nvcc")
    fallback = "/usr/local/cuda/bin/nvcc"
    text = _run(nvcc or fallback, "--version")
    release = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    compiler = _run("c++", "--version").splitlines()
    driver = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", _run("nvidia-smi", "-q"))
    return {
        "cuda_toolkit": release.group(1) if release else None,
        "nvcc_on_path": bool(nvcc),
        "driver_cuda": driver.group(1) if driver else None,
        "compiler": compiler[0] if compiler else None,
    }


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


def _interpreter() -> dict[str, Any]:
    """Which Python is really active, in words: a non-login shell can select another one."""
    kind = "virtual environment" if sys.prefix != sys.base_prefix else "system"
    if (Path(sys.prefix) / "conda-meta").is_dir():
        kind = "conda environment"
    on_path = shutil.which("python3") or shutil.which("python")
    wanted = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "kind": kind,
        # Folders are compared: the executables of two environments are often links to one file.
        "same_as_python3_on_path": _same(Path(on_path).parent, Path(sys.executable).parent) if on_path else None,
        "same_as_activated_environment": _same(Path(wanted), Path(sys.prefix)) if wanted else None,
        "in_jupyter_kernel": "ipykernel" in sys.modules,
    }


def _software() -> dict[str, Any]:
    found: dict[str, Any] = {k: _version_of(v) for k, v in _PACKAGES.items()}
    torch = _torch()
    if torch is not None:
        # The wheel's own string carries the build ("+cu130"), the metadata does not always.
        cuda = torch.version.cuda
        found |= {"torch": str(torch.__version__), "torch_cuda": cuda}
        found["cudnn"] = torch.backends.cudnn.version() if cuda else None
        if cuda:
            with contextlib.suppress(AttributeError, RuntimeError):
                found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def environment() -> dict[str, Any]:
    """The environment group of a recording (Section B.9): hardware, driver, software, clocks now.

    Returns:
        Plain JSON values. ``gpu`` is the name of GPU 0 or None; ``gpus`` describes each; memory in MiB, clocks in MHz,
        power in W, temperature in degrees Celsius.
    """
    gpus = _gpus()
    found = {
        "gpu": gpus[0]["name"] if gpus else None,
        "gpu_count": len(gpus),
        "driver": gpus[0]["driver"] if gpus else None,
        **_toolkit(),
        "gpus": gpus,
        "links": _links() if gpus else {"nvlinks_per_gpu": None, "nvlink_GBps_per_link": None, "gpu_pairs": {}},
        "nics": _nics(),
        "cpu": cpu(),
        "system": f"{platform.system()} {platform.release()}",
        "interpreter": _interpreter(),
        "software": _software(),
        "storage": {"working_folder": _storage_type(Path.cwd()), "temporary_folder": _storage_type(Path("/tmp"))},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "at_start": gpu_state(),
    }
    return scrub(found)


def table(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return `environment()` as (item, value) lines in the order of the report's Table 45."""
    cpu, software, python, links = found["cpu"], found["software"], found["interpreter"], found["links"]
    names = Counter(_say(g["name"]) for g in found["gpus"])
    lines = [("Compute", ", ".join(f"{n} x {k}" for k, n in names.items()) or "no NVIDIA GPU visible")]
    for i, g in enumerate(found["gpus"]):
        lines += _gpu_lines(i, g, dict(enumerate(found["at_start"]["gpus"])).get(i, {}))
    pairs = ", ".join(f"{n} pairs {k}" for k, n in links["gpu_pairs"].items()) or "no GPU pair"
    nvlinks = f"{_say(links['nvlinks_per_gpu'])} NVLinks per GPU at {_say(links['nvlink_GBps_per_link'])} GB/s"
    toolkit = f"toolkit {_say(found['cuda_toolkit'])}"
    if found["cuda_toolkit"] and not found["nvcc_on_path"]:
        toolkit += " (nvcc not on PATH)"
    cores = f"{_say(cpu['usable_cores'])} of {_say(cpu['logical_cores'])} cores usable, {_say(cpu['memory_MiB'])} MiB"
    other = "; NOT the python3 on PATH" if python["same_as_python3_on_path"] is False else ""
    nics = [f"{n['device']} {n['kind']} {_say(n['rate'])} {_say(n['state'])}" for n in found["nics"]]
    variables = [f"{k}={v}" for k, v in found["variables"].items()]
    return [
        *lines,
        ("Driver/toolkit", f"driver {_say(found['driver'])}, its CUDA {_say(found['driver_cuda'])}, {toolkit}"),
        ("Intra-node fabric", f"{pairs}; {nvlinks}"),
        ("Network", "; ".join(nics) or "none visible"),
        ("Storage", f"working folder on {_say(found['storage']['working_folder'])}"),
        ("CPU", f"{_say(cpu['model'])}, {cores}{', virtual machine' if cpu['virtual_machine'] else ''}"),
        ("System", found["system"]),
        ("Interpreter", f"{python['python']}, {python['kind']}{other}"),
        ("Compiler", _say(found["compiler"])),
        *((k, _say(v)) for k, v in software.items()),
        ("Variables", ", ".join(variables) or "none of those that change a step"),
    ]


def _gpu_lines(i: int, gpu: Mapping[str, Any], state: Mapping[str, Any]) -> list[tuple[str, str]]:
    clock = f"SM {_say(state.get('sm_clock_MHz'))} of {_say(gpu['sm_clock_max_MHz'])} MHz"
    power = f"{_say(state.get('power_W'))} of {_say(gpu['power_limit_W'])} W, {_say(state.get('temperature_C'))} °C"
    modes = f"persistence {_say(gpu['persistence_mode'])}, MIG {_say(gpu['mig_mode'])}, ECC {_say(gpu['ecc_mode'])}"
    memory = (f"GPU {i} memory", f"{_say(gpu['memory_MiB'])} MiB")
    return [memory, (f"GPU {i} clocks and power", f"{clock}, {power}, {modes}")]


def _say(value: Any) -> str:
    return "unknown" if value is None else str(value)
