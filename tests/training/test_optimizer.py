"""Skip-step AdamW: equals torch's AdamW, skips whole, never reads the host."""

from __future__ import annotations

import copy

import pytest
import torch

from workbench.training.optimizer import SkipStepAdamW


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4, bias=False))


def test_equals_torch_adamw_with_clipping_and_exclusions():
    ours = model()
    theirs = copy.deepcopy(ours)
    opt = SkipStepAdamW(ours, lr=1e-2, no_decay=lambda n, p: p.ndim == 1, clip=0.5)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    ref = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for i in range(20):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(i))
        for net, zero in ((ours, opt.zero_grad), (theirs, ref.zero_grad)):
            zero()
            loss = net(x).square().mean() * 10
            loss.backward()
            if net is ours:
                opt.step(loss)
            else:
                torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
                ref.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", ["nan_grad", "inf_grad", "nan_loss"])
def test_a_non_finite_step_leaves_everything_untouched(bad):
    net = model()
    opt = SkipStepAdamW(net, lr=1e-2)
    net(torch.randn(4, 8)).sum().backward()
    opt.step(torch.tensor(1.0))
    before = {k: v.clone() for k, v in opt.state().items()}
    opt.zero_grad()
    net(torch.randn(4, 8)).sum().backward()
    if bad != "nan_loss":
        opt.grads[3] = float("nan") if bad == "nan_grad" else float("inf")
    out = opt.step(torch.tensor(float("nan") if bad == "nan_loss" else 1.0))
    assert out["applied"] == 0.0
    for name in ("params", "exp_avg", "exp_avg_sq", "applied", "recent", "seen"):
        assert torch.equal(opt.state()[name], before[name]), name
    assert opt.skipped == 1.0


def test_an_outlier_is_skipped_once_half_the_window_is_filled():
    net = model()
    opt = SkipStepAdamW(net, lr=0.0, window=8, sigma=6.0)

    def step(loss: float) -> float:
        opt.zero_grad()
        net(torch.ones(1, 8)).sum().backward()
        return float(opt.step(torch.tensor(loss))["applied"])

    assert step(1.0) == 1.0
    assert step(50.0) == 1.0, "too early to judge"
    opt.recent.zero_(), opt.seen.zero_()
    assert [step(1.0 + 0.01 * i) for i in range(6)] == [1.0] * 6
    assert step(2.0) == 0.0
    assert step(1.02) == 1.0


def test_parameters_stay_views_of_the_flat_buffer():
    net = model()
    opt = SkipStepAdamW(net, lr=1e-2)
    opt.zero_grad()
    net(torch.randn(4, 8)).sum().backward()
    assert opt.grads.abs().sum() > 0
    flat = torch.cat([dict(net.named_parameters())[n].reshape(-1) for n in opt.names])
    assert torch.equal(flat, opt.params)


def test_a_checkpoint_of_another_shape_is_refused():
    opt = SkipStepAdamW(model(), lr=1e-2, window=16)
    state = SkipStepAdamW(model(), lr=1e-2, window=8).state()
    with pytest.raises(ValueError, match="recent"):
        opt.load_state(state)
    with pytest.raises(ValueError, match="lacks"):
        opt.load_state({})


def test_bf16_parameters_are_the_rounded_fp32_masters():
    net = model().to(torch.bfloat16)
    opt = SkipStepAdamW(net, lr=1e-4)
    for _ in range(5):
        opt.zero_grad()
        loss = net(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        opt.step(loss)
    assert opt.params.dtype == torch.float32
    flat = torch.cat([dict(net.named_parameters())[n].reshape(-1) for n in opt.names])
    assert torch.equal(flat, opt.params.to(torch.bfloat16))
    assert not torch.equal(flat.float(), opt.params), "updates below a BF16 step live in the masters"


def test_a_step_reads_nothing_on_the_host(monkeypatch):
    net = model()
    opt = SkipStepAdamW(net, lr=1e-2)
    net(torch.randn(4, 8)).sum().backward()

    def forbidden(*_):
        raise AssertionError("a step read a tensor on the host")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    opt.step(torch.tensor(1.0))
