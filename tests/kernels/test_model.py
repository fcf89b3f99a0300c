"""Development model: one function on every path, the report's sizes, a step that learns."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from moe_kernels.model import DevelopmentModel, ModelConfig, TrainStep, development_config, make_optimizer, small_config  # noqa: E402
from moe_kernels.model.api import _rotate  # noqa: E402
from moe_kernels.transport import VirtualTransport  # noqa: E402
from ranks import assert_close  # noqa: E402


def make(path: str, ranks: int = 1, config: ModelConfig | None = None, **options) -> DevelopmentModel:
    if path == "rowwise":
        options["transport"] = VirtualTransport(ranks, "cpu")
    return DevelopmentModel(config or small_config(capacity_factor=8.0, router_mode="learned"), path=path, **options)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def test_development_sizes_are_the_reports():
    config = ModelConfig()
    assert config.parameters == pytest.approx(9.6e9, rel=0.005)
    assert config.active_parameters == pytest.approx(1.36e9, rel=0.005)
    assert (config.layers, config.dense_layers, config.block.num_experts, config.block.top_k) == (8, 1, 128, 8)
    assert development_config(32).parameters < config.parameters / 3


def test_counted_parameters_are_the_models():
    for config in (small_config(), small_config(shared_width=0, num_experts=6)):
        assert sum(p.numel() for p in DevelopmentModel(config).parameters()) == config.parameters


@pytest.mark.parametrize("path, ranks", [("synchronized", 1), ("rowwise", 1), ("rowwise", 2), ("rowwise", 4)])
def test_paths_agree(path, ranks):
    config = small_config(capacity_factor=8.0, router_mode="learned", lbl_granularity="instance", sequence_length=16)
    config = replace(config, lbl_coefficient=0.1, z_coefficient=0.01)
    expected, model = make("no_ep", config=config), make(path, ranks, config)
    tokens, targets = (torch.cat(pair) for pair in zip(batch(0), batch(1)))
    losses = [m.loss(tokens, targets) for m in (expected, model)]
    assert_close("loss", losses[1].detach(), losses[0].detach(), 1e-5)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(expected.named_parameters(), model.parameters()):
        assert_close(name, q.grad, p.grad, 1e-3)


def test_a_step_learns_and_leaves_nothing_leased():
    model = make("rowwise", 2)
    step = TrainStep(model, make_optimizer(model, learning_rate=1e-2))
    losses = [step([batch(0), batch(1)]) for _ in range(8)]
    assert losses[0].shape == (2,)
    assert losses[-1].mean() < losses[0].mean() - 0.3
    assert model.pool.held == ()
    assert model.pool.high_water == 2
    model.pool.freeze()
    step([batch(0)])


def test_clipping_bounds_the_update_and_never_reads_the_norm():
    model = make("no_ep")
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_norm=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    step([batch()])
    moved = torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), before)]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


def test_causal_attention_sees_no_later_token():
    model = make("no_ep", annotate=False)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 64
    with torch.no_grad():
        assert torch.allclose(model(tokens)[:, :10], model(changed)[:, :10], atol=1e-6)
        assert not torch.allclose(model(tokens)[:, 10:], model(changed)[:, 10:], atol=1e-3)


def test_scores_depend_on_distances_between_positions():
    """Rotary positions: the product of a rotated query and key is that of any pair as far apart."""
    model = make("no_ep")
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    rope = (model.rope_cos, model.rope_sin)
    rotated_q, rotated_k = (_rotate(t.expand(1, 1, 64, 8), rope)[0, 0] for t in (q, k))
    scores = rotated_q @ rotated_k.t()
    for distance in (0, 3, 20):
        band = scores.diagonal(distance)
        assert torch.allclose(band, band[:1].expand_as(band), atol=1e-4)
    assert torch.allclose(rotated_q.norm(dim=-1), q.norm().expand(64), atol=1e-5)
    angle = 500_000.0 ** (-2 / 8)
    by_hand = q[1] * math.cos(5 * angle) - q[5] * math.sin(5 * angle)
    assert float(rotated_q[5, 1]) == pytest.approx(float(by_hand), abs=1e-5)


def test_ranges_name_blocks_and_microbatches():
    model = make("no_ep")
    step = TrainStep(model, make_optimizer(model))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step([batch(0), batch(1)])
    names = [e.name for e in profiler.events()]
    for index in range(3):
        assert names.count(f"block {index} forward") == 2
        assert names.count(f"block {index} backward") == 2
    assert names.count("microbatch 1") == 1
    spans = {e.name: e.time_range for e in profiler.events()}
    assert spans["block 2 backward"].end <= spans["block 1 backward"].start
    assert spans["block 1 backward"].end <= spans["block 0 backward"].start


def test_ranges_change_no_gradient():
    tokens, targets = batch()
    grads = []
    for annotate in (True, False):
        model = make("no_ep", annotate=annotate)
        model.loss(tokens, targets).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match=r"heads \(20\) must be a multiple of kv_heads \(3\)"):
        ModelConfig(kv_heads=3)
    with pytest.raises(ValueError, match=r"block\.width \(2560\) must equal"):
        ModelConfig(width=64)
    with pytest.raises(ValueError, match="S <= 64 expected"):
        make("no_ep")(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one microbatch"):
        model = make("no_ep")
        TrainStep(model, make_optimizer(model))([])


def test_an_interrupted_step_leaves_no_lease_and_no_gradient(monkeypatch):
    model = make("rowwise", 2)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0))
    whole, expected = [batch(0), batch(1)], make("rowwise", 2)
    calls = []

    def interrupted(x, normal=model.norm.forward):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return normal(x)

    # The second microbatch stops after its routed blocks: their leases are out, the first one's gradients are there.
    monkeypatch.setattr(model.norm, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(whole)
    assert model.pool.held == () and all(p.grad is None for p in model.parameters())
    step(whole)
    TrainStep(expected, torch.optim.SGD(expected.parameters(), lr=1.0))(whole)
    for p, q in zip(model.parameters(), expected.parameters()):
        assert torch.equal(p, q)
