"""Training runs on the CPU: learning, resuming after a kill, branching, segments."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from workbench.experiments import load
from workbench.training import checkpoint
from workbench.training.campaigns import lbl_branch, segment_bounds, segmented, steps_of
from workbench.training.config import TINY, RunConfig
from workbench.training.corpus import Corpus, DataOrder, load_corpus, standard_library
from workbench.training.run import Trainer, branch, train

SMALL = RunConfig(**{**TINY, "layers": 2, "width": 32, "heads": 2, "head_dim": 16, "dense_width": 64, "experts": 8})


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small folder of text, so that no test reads the whole standard library."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (folder / "b.py").write_text("def f(x):\n    return x + 1\n" * 300)
    return str(folder)


KEYS = [(1, "original"), (1, "branch"), (3, "original"), (3, "branch")]


def config(text: str, steps: int, **changes) -> RunConfig:
    tokens = steps * SMALL.batch * SMALL.sequence
    return SMALL.replace(corpus=text, total_tokens=tokens, warmup_tokens=tokens // 10, **changes)


def test_it_learns(text, tmp_path):
    rows = train(config(text, 60), tmp_path / "run")
    assert len(rows) == 60 and [r["step"] for r in rows] == list(range(1, 61))
    assert rows[0]["ce"] == pytest.approx(np.log(256), rel=0.05), "an untrained model knows nothing"
    assert rows[-1]["ce"] < 0.6 * rows[0]["ce"]
    assert all(r["applied"] in (0.0, 1.0) for r in rows)
    assert all(r["lbl"] <= SMALL.experts / SMALL.top_k for r in rows), "all routes to K experts is the largest value"
    assert min(r["lbl"] for r in rows) < 1.1


def test_killed_at_any_moment_it_resumes_bit_for_bit(text, tmp_path):
    wanted = config(text, 40)
    straight = train(wanted, tmp_path / "straight", checkpoint_every=5)
    code = (
        "import json,sys;from pathlib import Path;from workbench.training.config import RunConfig;"
        "from workbench.training.run import train;"
        "train(RunConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), checkpoint_every=5)"
    )
    folder = tmp_path / "killed"
    kills = 0
    for wait in (0.15, 0.4, 0.9):
        child = subprocess.Popen([sys.executable, "-c", code, json.dumps(wanted.as_dict()), str(folder)])
        limit = time.monotonic() + 60
        before = checkpoint.steps(folder)
        # Kill a random moment after progress began, so that writes and steps are both hit.
        while child.poll() is None and checkpoint.steps(folder) == before and time.monotonic() < limit:
            time.sleep(0.005)
        time.sleep(wait * 0.1)
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.wait()
        if (folder / "history.csv").exists():
            break
    assert kills >= 1
    resumed = train(wanted, folder, checkpoint_every=5)
    assert resumed == straight
    assert not list(folder.glob(".writing-*")), "leftovers of a killed writer are removed"


def test_foreign_folders_are_no_checkpoints_and_damaged_ones_are_named(text, tmp_path):
    train(config(text, 3), tmp_path / "run")
    for name in ("step_abc", "step_3", "step_-0000001", "step_²²²²²²²²"):
        (tmp_path / "run" / name).mkdir()
        for part in ("meta.json", "tensors.safetensors"):
            (tmp_path / "run" / name / part).write_text("{}")
    assert checkpoint.steps(tmp_path / "run") == [3]
    (tmp_path / "run" / "step_00000003" / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"step_00000003.meta\.json is damaged"):
        checkpoint.load(tmp_path / "run")
    (tmp_path / "run" / "step_00000003" / "tensors.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not a header")
    with pytest.raises(ValueError, match=r"step_00000003.tensors\.safetensors is damaged"):
        checkpoint.load(tmp_path / "run")


def test_a_checkpoint_of_another_run_is_refused(text, tmp_path):
    train(config(text, 3), tmp_path / "run")
    with pytest.raises(ValueError, match="lr"):
        train(config(text, 3, lr=5e-4), tmp_path / "run")


def test_a_branch_reloads_everything_and_changes_one_thing(text, tmp_path):
    base = config(text, 20)
    train(base, tmp_path / "a", steps=10)
    changed = branch(tmp_path / "a", 10, tmp_path / "b", lbl_coefficient=0.005)
    rows = train(changed, tmp_path / "b")
    assert [r["step"] for r in rows] == list(range(11, 21))
    note = {"from": "a", "step": 10, "changes": {"lbl_coefficient": [0.05, 0.005]}}
    assert checkpoint.load(tmp_path / "b")[1]["branch"] == note, "a branch's later checkpoints say where it is from"
    original = train(base, tmp_path / "a")
    first = next(r for r in original if r["step"] == 11)
    assert rows[0]["ce"] == first["ce"], "the same state sees the same batch"
    assert rows[-1]["ce"] != original[-1]["ce"]
    with pytest.raises(ValueError, match="changes at least one"):
        branch(tmp_path / "a", 10, tmp_path / "c", lbl_coefficient=0.05)
    with pytest.raises(FileNotFoundError, match="step 7"):
        branch(tmp_path / "a", 7, tmp_path / "d", lr=1.0)


def test_a_branch_campaign_keeps_both_arms_of_every_seed_and_their_throughput(text, tmp_path):
    said: list[str] = []
    configs = [config(text, 60, seed=s, data_seed=s) for s in (3, 1)]
    rows = lbl_branch(configs, tmp_path, at_step=30, coefficient=0.005, device="cpu", progress=said.append)
    steps = {key: [r["step"] for r in rows if (r["seed"], r["arm"]) == key] for key in KEYS}
    assert list(steps) == list(dict.fromkeys((r["seed"], r["arm"]) for r in rows))
    assert all(v == list(range(1 if arm == "original" else 31, 61)) for (_, arm), v in steps.items())
    timed = [r["step"] for r in rows if r["tokens_per_s"] and (r["seed"], r["arm"]) == (1, "original")]
    assert timed == [25, 30, 50, 60]
    assert said[0].startswith("seed 3 original: step 25, ce ") and len(said) == 2 * 2 + 2 * 4
    ce = {(r["seed"], r["arm"], r["step"]): r["ce"] for r in rows}
    assert ce[1, "original", 31] == ce[1, "branch", 31], "the branch reloads the checkpoint and sees the same batch"
    assert ce[1, "original", 60] != ce[1, "branch", 60]
    alone = train(configs[1], tmp_path / "alone")
    assert [f"{r['ce']:.7g}" for r in alone] == [f"{ce[1, 'original', r['step']]:.7g}" for r in alone]


def test_segments_overlap_and_repeat_their_losses(text, tmp_path):
    wanted = config(text, 30, batch_multiples=(1, 2, 3), batch_fractions=(0.3, 0.6))
    said: list[str] = []
    rows = segmented(
        wanted, tmp_path, schedule="warmup", segments=3, overlap=2, device="cpu",
        partial=tmp_path / "rows.jsonl", progress=said.append,
    )  # fmt: skip
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows
    assert said[-1].startswith(f"warmup: segment 3 of 3, step {steps_of(wanted)} of") and "tokens/s" in said[-1]
    total = steps_of(wanted)
    assert total < 30, "a growing batch takes fewer steps"
    by_step: dict[int, list[dict]] = {}
    for r in rows:
        by_step.setdefault(r["step"], []).append(r)
    assert sorted(by_step) == list(range(1, total + 1))
    twice = [v for v in by_step.values() if len(v) == 2]
    assert len(twice) == 4
    assert all(a["ce"] == b["ce"] and a["segment"] < b["segment"] for a, b in twice)
    assert {r["batch"] for r in rows} == {8, 16, 24}
    assert [r["seconds"] for r in rows if r["segment"] == 1] == sorted(r["seconds"] for r in rows if r["segment"] == 1)


@pytest.mark.parametrize(
    "slug, size, rows",
    [("fig45_lbl_branch", {"steps": 20, "branch_step": 15, "seeds": [0]}, 20 + 5),
     ("fig66_batch_warmup", {"total_tokens": 21_504, "multiples": [1, 3], "segments": 2, "overlap": 1},
      21 + 7 + 1 + 42 + 14)],
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny campaign of a machine without a GPU")
def test_a_tiny_campaign_is_measured_on_a_cpu_and_says_how(slug, size, rows):
    result = load(slug).run("live", tiny=True, **size)
    assert result.table.height == rows and result.table["ce"].is_finite().all()
    said = result.recording.record
    assert said["protocol"]["steps"] == "eager" and said["protocol"]["timer"].startswith("perf_counter")
    assert said["precision"]["masters"] == "float32" and said["topology"]["gpus"] == 0
    assert len(said["workload"]["corpus"]["sha256"]) == 64 and said["workload"]["seeds"] == [0]
    with pytest.raises(ValueError, match="tiny: expected True on a machine without a GPU"):
        load(slug).run("live", **size)


def test_segment_bounds_cover_the_run():
    bounds = segment_bounds(100, 26, 5)
    assert len(bounds) == 26 and bounds[0][0] == 0 and bounds[-1][1] == 100
    assert all(b[0] <= a[1] for a, b in itertools.pairwise(bounds))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_a_step_reads_nothing_from_the_device(text, graphs):
    trainer = Trainer(config(text, 8, dtype="bfloat16"), "cuda", graphs=graphs)
    for _ in range(3):
        trainer.step()
    trainer.read_back()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_our_verifier_finds_no_wait_in_a_step_with_its_metrics(text, graphs):
    import workbench

    trainer = Trainer(config(text, 40, dtype="bfloat16", shared_width=32), "cuda", graphs=graphs)
    verdict = workbench.verify(trainer.step, steps=3, warmup=3)
    assert not verdict.offences, str(verdict)
    assert len(trainer.read_back()) >= 6, "the metrics of every profiled step were there to be read"

    def reading() -> None:
        trainer.step()
        trainer.read_back()

    assert workbench.verify(reading, steps=3, warmup=1, stacks=False).offences


@pytest.mark.gpu
def test_graph_replays_train_like_eager_steps(text):
    growing = config(text, 24, dtype="bfloat16", shared_width=32, batch_multiples=(1, 2, 3), batch_fractions=(0.3, 0.6))

    def history(graphs: bool) -> list[dict[str, float]]:
        trainer = Trainer(growing, "cuda", graphs=graphs)
        while not trainer.done:
            trainer.step()
        return trainer.read_back()

    eager, again, replayed = history(False), history(False), history(True)
    assert {r["batch"] for r in replayed} == {8, 16, 24}
    assert [r["lr"] for r in replayed] == [r["lr"] for r in eager]
    assert replayed[0]["ce"] == pytest.approx(eager[0]["ce"], abs=1e-6), "capturing left no trace in the state"
    # Eager against eager is the yardstick, should a kernel of the backward add in no fixed order.
    noise = max(abs(a["ce"] - b["ce"]) for a, b in zip(eager, again))
    assert max(abs(a["ce"] - b["ce"]) for a, b in zip(eager, replayed)) <= 4 * noise + 2e-3


def test_graphs_need_a_gpu(text):
    with pytest.raises(ValueError, match="graphs: expected a CUDA device, got 'cpu'"):
        Trainer(config(text, 8), "cpu", graphs=True)


def test_data_order_does_not_depend_on_batch_or_restart():
    corpus = Corpus(np.arange(1000, dtype=np.uint16) % 256, 256, {})
    order = DataOrder(corpus, 10, seed=3)
    whole = order.batch(0, 250)
    assert np.array_equal(whole, np.concatenate([order.batch(i, 25) for i in range(0, 250, 25)]))
    assert sorted(whole[: order.windows, 0]) == sorted(corpus.tokens[np.arange(order.windows) * 10])
    assert not np.array_equal(whole[:99], whole[99:198]), "another pass, another order"
    with pytest.raises(ValueError, match="shorter than one sequence"):
        DataOrder(Corpus(np.zeros(5, np.uint16), 256, {}), 10).batch(0, 1)


def test_corpora(tmp_path, text):
    assert any(p.name == "dataclasses.py" for p in standard_library())
    bytes_ = load_corpus(text)
    assert bytes_.vocabulary == 256 and set(bytes_.provenance["files"]) == {"a.txt", "b.py"}
    bpe = load_corpus(text, vocabulary=300)
    assert bpe.vocabulary <= 300 and bpe.tokens.size < bytes_.tokens.size
    np.save(tmp_path / "t.npy", np.arange(100))
    assert load_corpus(str(tmp_path / "t.npy"), vocabulary=100).tokens.size == 100
    with pytest.raises(ValueError, match="expected ids 0 to 49"):
        load_corpus(str(tmp_path / "t.npy"), vocabulary=50)
    with pytest.raises(ValueError, match="integers"):
        load_corpus(np.zeros(3))
    for bad in (-5, 0, 1):
        with pytest.raises(ValueError, match=f"vocabulary: expected 256 .* got {bad}"):
            load_corpus(text, vocabulary=bad)
        with pytest.raises(ValueError, match=f"vocabulary: expected at least 2 token ids, got {bad}"):
            load_corpus(np.zeros(3, np.int64), vocabulary=bad)
        with pytest.raises(ValueError, match=f"vocabulary: expected at least 2, got {bad}"):
            SMALL.replace(vocabulary=bad)
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError):
        load_corpus(str(tmp_path / "o.npy"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_corpus(str(tmp_path / "none"))
