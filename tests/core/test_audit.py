"""The audit with a made-up GPU tool, without any GPU, and what scrubbing lets through."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core import audit, scrub

STATIC = "NVIDIA H200, 143771, 9.0, 580.159.04, 1980, 3201, 700.00, 700.00, Enabled, Default, Disabled, [N/A], 5, 16"
STATE = "345, 3201, 76.87, 33, 0, 0, P0, 0x0000000000000001"
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-15\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-15\t0
GPU2\tSYS\tNV18\t X \tSYS\t0-15\t0
NIC0\tPXB\tSYS\tSYS\t X

Legend:
  X    = Self
"""
NVLINK = "GPU 0: NVIDIA H200 (UUID: GPU-01234567-89ab-cdef-0123-456789abcdef)\n" + "".join(
    f"\t Link {i}: 26.562 GB/s\n" for i in range(18)
)


def fake_tool(folder: Path, *, static: str = STATIC, state: str = STATE, broken: str = "") -> None:
    """Write an `nvidia-smi` that answers as the real one does, for three GPUs."""
    script = f"""#!{sys.executable}
import sys
a = " ".join(sys.argv[1:])
if {broken!r} and {broken!r} in a: sys.exit("Field is not valid")
if "topo" in a: print({TOPOLOGY!r})
elif "nvlink" in a: print({NVLINK!r})
elif "-q" == a: print("Timestamp : now\\nDriver Version : 580.159.04\\nCUDA Version    : 13.0")
elif "-L" == a: print("GPU 0: NVIDIA H200 (UUID: GPU-01234567-89ab-cdef-0123-456789abcdef)")
elif "--query-gpu" in a:
    asked = a.split("--query-gpu=")[1].split()[0].split(",")
    known = dict(zip({list(audit._STATIC.values())!r}, {static!r}.split(", ")))
    known.update(zip({list(audit._STATE.values())!r}, {state!r}.split(", ")))
    for _ in range(3): print(", ".join(known[q] for q in asked))
"""
    path = folder / "nvidia-smi"
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def three_gpus(tmp_path, monkeypatch):
    fake_tool(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


def test_gpus_are_read(three_gpus):
    found = audit.environment()
    assert found["gpu"] == "NVIDIA H200" and found["gpu_count"] == 3 and found["driver"] == "580.159.04"
    gpu = found["gpus"][2]
    assert gpu["memory_MiB"] == 143771 and gpu["power_limit_W"] == 700.0 and gpu["compute_capability"] == "9.0"
    assert gpu["ecc_mode"] is None, "[N/A] is not known"
    assert found["driver_cuda"] == "13.0"
    assert found["at_start"]["gpus"][0] == {
        "sm_clock_MHz": 345,
        "memory_clock_MHz": 3201,
        "power_W": 76.87,
        "temperature_C": 33,
        "utilization_pct": 0,
        "memory_used_MiB": 0,
        "performance_state": "P0",
        "clock_limit_reasons": "0x0000000000000001",
    }


def test_links_are_counted_once_per_pair(three_gpus):
    links = audit.environment()["links"]
    assert links == {"nvlinks_per_gpu": 18, "nvlink_GBps_per_link": 26.562, "gpu_pairs": {"NV18": 2, "SYS": 1}}


def test_one_unknown_field_does_not_lose_the_others(three_gpus):
    fake_tool(three_gpus, broken="clocks_throttle_reasons")
    state = audit.gpu_state()["gpus"]
    assert len(state) == 3 and state[0]["sm_clock_MHz"] == 345 and state[0]["clock_limit_reasons"] is None


def test_lines_name_every_item(three_gpus):
    lines = dict(audit.table(audit.environment()))
    assert lines["Compute"] == "3 x NVIDIA H200"
    assert lines["GPU 1 clocks and power"].startswith("SM 345 of 1980 MHz, 76.87 of 700.0 W, 33 °C")
    assert lines["Intra-node fabric"] == "2 pairs NV18, 1 pairs SYS; 18 NVLinks per GPU at 26.562 GB/s"


def test_without_a_gpu(no_gpu):
    found = audit.environment()
    if found["gpu_count"]:
        pytest.skip("torch sees a GPU on this machine")
    assert found["gpu"] is None and found["at_start"] == {"gpus": []} and found["links"]["gpu_pairs"] == {}
    lines = dict(audit.table(found))
    assert lines["Compute"] == "no NVIDIA GPU visible" and lines["torch"] != "unknown"


def test_interpreter_is_the_active_one():
    found = audit.environment()["interpreter"]
    assert found["python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert found["kind"] == ("virtual environment" if sys.prefix != sys.base_prefix else found["kind"])


@pytest.mark.parametrize("first, expected", [(None, False), ("own", True)])
def test_another_python_on_path_is_noticed(tmp_path, monkeypatch, first, expected):
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    folder = Path(sys.executable).parent if first else tmp_path
    monkeypatch.setenv("PATH", str(folder))
    found = audit._interpreter()
    assert found["same_as_python3_on_path"] is expected
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix if first else str(tmp_path))
    assert audit._interpreter()["same_as_activated_environment"] is expected


@pytest.mark.parametrize(
    "folder, kind",
    [("/", "overlay"), ("/data/runs", "wekafs"), ("/data/with space/x", "nfs4"), ("/database", "overlay")],
)
def test_storage_is_the_innermost_mount(monkeypatch, folder, kind):
    lines = [
        "overlay / overlay rw",
        "h:/a /data wekafs rw",
        r"h:/b /data/with\040space nfs4 rw",
        "proc /proc proc rw",
        "broken",
    ]
    mounts = "\n".join(lines)
    monkeypatch.setattr(audit, "_read", lambda path: mounts)
    monkeypatch.setattr(Path, "resolve", lambda self: self)
    assert audit._storage_type(Path(folder)) == kind


@pytest.mark.parametrize("inside", [True, False])
def test_a_jupyter_kernel_is_noticed(monkeypatch, inside):
    monkeypatch.setitem(sys.modules, "ipykernel", audit) if inside else monkeypatch.delitem(
        sys.modules, "ipykernel", False
    )
    assert audit._interpreter()["in_jupyter_kernel"] is inside


def test_only_listed_variables_and_no_identity(monkeypatch, three_gpus):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "enx0123456789ab")
    monkeypatch.setenv("NCCL_API_KEY", "do-not-show")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-01234567-89ab-cdef-0123-456789abcdef")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(scrub, "_own_names", lambda: ("visiblehost",))
    monkeypatch.setattr(audit.platform, "release", lambda: "6.1-visiblehost")
    found = audit.environment()
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    text = json.dumps(found)
    for secret in ("do-not-show", "0123456789ab", "visiblehost", str(Path.home() / ""), sys.prefix, os.getcwd()):
        assert secret not in text, secret
    assert scrub.leaks(found) == []


def test_needs_no_more_than_the_standard_library(tmp_path):
    """Module-level imports must work on a bare machine: isolated Python without site-packages."""
    root = Path(audit.__file__).parents[2]
    code = f"import json, sys; sys.path.insert(0, {str(root)!r}); from workbench.core import audit as a; "
    code += "print(json.dumps(a.environment()))"
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["software"]["torch"] is None


@pytest.mark.parametrize(
    "text, kind",
    [
        ("/home/someone/run.py", "path"),
        ("~/notes/x", "path"),
        (r"C:\Users\someone\x", "path"),
        (r"C:\\Users\\someone\\x", "path"),
        ("see https://example.org/a?b=c", "URL"),
        ("10.0.0.7", "IPv4"),
        ("fe80::1c2b:3d4e", "IPv6"),
        ("2001:db8:0:1:1:1:1:1", "IPv6"),
        ("00:1a:2b:3c:4d:5e", "MAC"),
        ("someone@example.org", "e-mail"),
        ("hf_" + "a" * 20, "token"),
        ("GPU-01234567-89ab-cdef-0123-456789abcdef", "device serial"),
    ],
)
def test_identifying_text_is_found_and_removed(text, kind):
    assert any(kind in line for line in scrub.leaks({"field": [text]}))
    assert scrub.leaks(scrub.scrub({"field": [text]})) == []


@pytest.mark.parametrize(
    "text",
    [
        "590.48.01",
        "13.0.88",
        "2.13.0+cu130",
        "tokens/s/GPU",
        "D2H copy and/or wait",
        "CPython 3.12.3",
        "12:34:56",
        "2026-11-29T13:33:25+00:00",
        "c++ (Debian 12.2.0-14+deb12u1) 12.2.0",
        "w[L, K, N] @ x",
        "1/EP",
        "0x0000000000000001",
        "1:2",
    ],
)
def test_ordinary_text_stays(text):
    assert scrub.scrub(text) == text and scrub.leaks(text) == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_scrubbing_is_final(value):
    once = scrub.scrub(value)
    assert scrub.scrub(once) == once and scrub.leaks(once) == []
    json.dumps(once)


def test_command(three_gpus):
    from typer.testing import CliRunner

    from workbench.cli.audit import app

    done = CliRunner().invoke(app, ["--json"])
    assert done.exit_code == 0 and json.loads(done.output)["gpu_count"] == 3
    plain = CliRunner().invoke(app, [])
    assert plain.exit_code == 0 and "3 x NVIDIA H200" in plain.output
