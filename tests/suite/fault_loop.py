"""Kill -9 a sweep's driver, workers and scheduler at random moments, restart what died, and count what came of it.

    python tests/suite/fault_loop.py --kills 30 --points 24 --seed 1

A light notebook runs at every point on a scheduler and two workers of this machine. After each kill whoever is dead is
started again with the same command, as an operator would. At the end every point must be in the results exactly once,
no finished run may have been replaced or run again, and no process or temporary folder may be left. The exit status is
1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
from notebook_maker import make, marked_processes

VICTIMS = ("driver", "worker", "machine", "scheduler")
MARK = "WORKBENCH_FAULT_LOOP"
PARAMETERS = 'point = 0\nplace = ""\nseconds = 0.2'
CELLS = (
    "import os, time\n"
    # The execution begins with the parent process, which the worker starts as soon as it found the point
    # unfinished; this cell runs seconds later on a busy machine. The process's age counts in clock ticks.
    "ticks = int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[19])\n"
    "age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf('SC_CLK_TCK')\n"
    "handle = os.open(os.path.join(place, 'ledger.txt'), os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
    "os.write(handle, f'start {point} {time.time() - age}\\n'.encode())\n"
    "time.sleep(seconds)",
    "from IPython.display import display\n"
    "mime = 'application/vnd.headroom.result+json'\n"
    "result = dict(slug='light', source='model', recording=None, badge='light', checks=[], params={})\n"
    "display({mime: result | {'table': [dict(square=point * point)]}, 'text/plain': 'light'}, raw=True)\n"
    "os.write(handle, f'end {point}\\n'.encode())",
)


def light_notebook(folder: Path) -> Path:
    """Write ``light.ipynb``: it notes each start and end in a ledger and reports the square of its point."""
    return make(folder, "light", *CELLS, parameters=PARAMETERS)


class Stage:
    """Scheduler, two workers and a driver; `tend` starts again whatever is dead."""

    def __init__(self, folder: Path, points: int) -> None:
        self.folder, self.points = folder, points
        self.out, self.ledger = folder / "out", folder / "ledger.txt"
        self.notebook = light_notebook(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.mark = uuid.uuid4().hex
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.starts: collections.Counter[str] = collections.Counter()
        self.done = False

    def commands(self) -> dict[str, list[str]]:
        """Return the command of each role."""
        dask = [sys.executable, "-m", "dask"]
        scratch = str(self.folder / "scratch")
        worker = [*dask, "worker", self.address, "--nworkers", "1", "--nthreads", "1", "--host", "127.0.0.1",
                  "--no-dashboard", "--local-directory", scratch, "--death-timeout", "5"]  # fmt: skip
        points = ",".join(str(i) for i in range(self.points))
        return {
            "scheduler": [*dask, "scheduler", "--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard"],
            "worker 1": worker,
            "worker 2": worker,
            "driver": [sys.executable, "-m", "workbench.cli", "sweep", str(self.notebook), "-p", f"point={points}",
                       "-p", f"place={self.folder}", "--scheduler", self.address, "--out", str(self.out)],
        }  # fmt: skip

    def tend(self) -> None:
        """Start what is dead; a driver that ended with status 0 has finished."""
        for role, command in self.commands().items():
            process = self.processes.get(role)
            if process is not None and process.poll() is None:
                continue
            if role == "driver" and process is not None and process.returncode == 0:
                self.done = True
                continue
            environment = {
                **os.environ,
                MARK: self.mark,
                "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1000",
                "DASK_LOGGING__DISTRIBUTED": "error",
            }
            with (self.folder / f"{role.replace(' ', '_')}.log").open("ab") as log:
                self.processes[role] = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            self.starts[role.split()[0]] += 1

    def kill(self, victim: str, rng: random.Random) -> bool:
        """SIGKILL a victim; a worker alone, or with the nanny that would restart it (a machine lost)."""
        role = rng.choice(("worker 1", "worker 2")) if victim in ("worker", "machine") else victim
        process = self.processes[role]
        if process.poll() is not None:
            return False
        children = psutil.Process(process.pid).children()
        doomed = [c.pid for c in children if "spawn_main" in " ".join(c.cmdline())] if victim != "driver" else []
        if victim == "worker" and not doomed:
            return False
        for pid in doomed + ([process.pid] if victim != "worker" else []):
            os.kill(pid, signal.SIGKILL)
        if victim != "worker":
            process.wait()
        return True

    def close(self) -> None:
        """End what was started here."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def left(self) -> list[int]:
        """Return processes that carry this stage's mark, kernels included."""
        return [pid for pid in marked_processes(self.mark) if pid != os.getpid()]

    def finished_runs(self) -> dict[str, tuple[int, int]]:
        """Return run folder -> what changes when it is replaced or written again."""
        found = {}
        for path in (self.out / "runs").glob("[!.]*/outcome.json"):
            status = path.stat()
            found[path.parent.name] = (status.st_ino, status.st_mtime_ns)
        return found


def loop(folder: Path, points: int, kills: int, seed: int, limit_s: float, wait_s: tuple[float, float]) -> dict:
    """Run one sweep under fire; return the counts."""
    rng, stage = random.Random(seed), Stage(folder, points)
    killed: collections.Counter[str] = collections.Counter()
    seen: dict[str, tuple[int, int]] = {}
    changed: set[str] = set()
    begun = time.monotonic()
    next_kill = begun + rng.uniform(*wait_s)

    def watch() -> None:
        now = stage.finished_runs()
        changed.update(k for k, v in seen.items() if now.get(k) != v)
        seen.update(now)

    try:
        while not stage.done and time.monotonic() - begun < limit_s:
            stage.tend()
            watch()
            if killed.total() < kills and time.monotonic() > next_kill:
                victim = VICTIMS[killed.total()] if killed.total() < len(VICTIMS) else rng.choice(VICTIMS)
                if stage.kill(victim, rng):
                    killed[victim] += 1
                    print(f"{time.monotonic() - begun:6.1f} s: killed {victim}, {len(seen)} finished", flush=True)
                next_kill = time.monotonic() + rng.uniform(*wait_s)
            time.sleep(0.1)
        watch()
    finally:
        stage.close()
    end = time.monotonic() + 10
    while (left := stage.left()) and time.monotonic() < end:
        time.sleep(0.2)
    return counts(stage, killed, changed, left, time.monotonic() - begun)


def counts(stage: Stage, killed: collections.Counter, changed: set[str], left: list[int], seconds: float) -> dict:
    """Compare the results with what was asked for."""
    path = stage.out / "sweep.json"
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    ledger = stage.ledger.read_text().split("\n") if stage.ledger.is_file() else []
    in_results = collections.Counter(r["params"]["point"] for r in runs if r["status"] == "passed")
    right = sum(r.get("rows") == [{"square": r["params"]["point"] ** 2}] for r in runs)
    finished_at = {
        json.loads(p.read_text())["params"]["point"]: p.stat().st_mtime
        for p in (stage.out / "runs").glob("[!.]*/outcome.json")
    }
    starts = [line.split() for line in ledger if line.startswith("start")]
    folders = list((stage.out / "runs").iterdir()) if (stage.out / "runs").is_dir() else []
    found = {
        "points": stage.points,
        "kills": dict(killed),
        "starts": dict(stage.starts),
        "driver_finished": stage.done,
        "once_in_results": sum(n == 1 for n in in_results.values()),
        "right_rows": right,
        "run_folders": sum(not f.name.startswith(".") for f in folders),
        "temporary_folders_left": sum(f.name.startswith(".") for f in folders),
        "finished_runs_lost_or_replaced": len(changed),
        "executions_started": len(starts),
        "executions_started_after_the_run_was_finished": sum(
            float(at) > finished_at.get(int(point), float("inf")) for _, point, at in starts
        ),
        "executions_ended": sum(line.startswith("end") for line in ledger),
        "processes_left": len(left),
        "seconds": round(seconds, 1),
    }
    everything = {"once_in_results", "right_rows", "run_folders"}
    nothing = {
        "temporary_folders_left",
        "finished_runs_lost_or_replaced",
        "executions_started_after_the_run_was_finished",
        "processes_left",
    }
    found["holds"] = (
        stage.done and all(found[k] == stage.points for k in everything) and not any(found[k] for k in nothing)
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=16)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one round")
    parser.add_argument("--between", type=float, nargs=2, default=(1.0, 8.0), help="seconds between kills")
    parser.add_argument("--keep", type=Path, help="folder for results and logs; else a temporary one")
    options = parser.parse_args()
    good = True
    for number in range(options.rounds):
        folder = Path(tempfile.mkdtemp(prefix="fault-loop-")) if options.keep is None else options.keep / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = loop(
                folder, options.points, options.kills, options.seed + number, options.limit, tuple(options.between)
            )
        finally:
            if options.keep is None:
                shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps({"seed": options.seed + number} | found), flush=True)
        good = good and found["holds"]
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
