"""Router: gating, top-k, counts and losses against the FP64 reference, forward and gradient."""

from __future__ import annotations

import pytest
import torch
from budgets import assert_within, budget
from moe_kernels.router import router, router_logits
from moe_kernels.router.api import route_logits
from moe_kernels.router.logits import pieces, side_by_side

# exp, log and division each round a few times in FP32; scores are at most 1, weights at most K = 4.
ROUNDINGS = 32 * 2.0**-24


def both(logits, noise=None, impl="triton", top_k=3, **options):
    """The kernel's output on FP32 logits and the reference's on the same logits in FP64, both with a graph."""
    single = logits.clone().requires_grad_()
    double = logits.double().cpu().requires_grad_()
    got = route_logits(single, top_k, noise=noise, impl=impl, **options)
    want = route_logits(double, top_k, noise=None if noise is None else noise.cpu(), impl="reference", **options)
    return single, double, got, want


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("mode", ["learned", "random", "uniform"])
@pytest.mark.parametrize(("normalize", "restore_scale"), [(True, False), (False, True)])
def test_kernel_equals_reference_forward_and_gradient(gating, mode, normalize, restore_scale, device):
    torch.manual_seed(3)
    logits = torch.randn(36, 6, device=device)
    noise = torch.rand(36, 6, device=device) if mode == "random" else None
    single, double, got, want = both(
        logits,
        noise,
        gating=gating,
        mode=mode,
        normalize=normalize,
        restore_scale=restore_scale,
        lbl_granularity="instance",
        sequence_length=12,
    )
    assert torch.equal(got.expert_index.cpu(), want.expert_index)
    assert torch.equal(got.counts.cpu(), want.counts)
    bound = torch.tensor(ROUNDINGS, dtype=torch.float64)
    assert_within(got.weights.cpu(), want.weights.detach(), bound * 4, "weights")
    assert_within(got.lbl.cpu(), want.lbl.detach(), bound * 4, "lbl")
    assert_within(got.z_loss.cpu(), want.z_loss.detach(), bound * want.z_loss.detach().abs(), "z_loss")
    pull = torch.randn(36, 3)
    (got.weights.cpu() * pull).sum().add(2 * got.lbl.cpu() + 0.3 * got.z_loss.cpu()).backward()
    (want.weights * pull).sum().add(2 * want.lbl + 0.3 * want.z_loss).backward()
    assert double.grad.abs().max() > 0, "systems modes keep the gradient too"
    assert_within(single.grad.cpu(), double.grad, bound * 16, "gradient of the logits")


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_reference_gradient_is_the_derivative(gating, normalize):
    torch.manual_seed(4)
    # Scores far apart, so that the small steps of the check cannot change which experts are chosen.
    logits = (torch.randperm(40).view(8, 5).double() * 0.2).requires_grad_()

    def losses(x):
        out = route_logits(x, 2, gating=gating, normalize=normalize, impl="reference")
        return out.weights, out.lbl, out.z_loss

    assert torch.autograd.gradcheck(losses, (logits,))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("granularity", ["batch", "instance"])
def test_perfect_balance_has_loss_exactly_one(impl, gating, granularity, device):
    logits = torch.zeros(32, 8, device=device) - 6.0
    out = route_logits(
        logits, 2, gating=gating, mode="uniform", lbl_granularity=granularity, sequence_length=8, impl=impl
    )
    assert out.counts.tolist() == [8] * 8
    assert out.lbl.item() == 1.0


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_small_sigmoid_scores_do_not_push_the_loss_below_one(impl, device):
    # Scores near 2e-4: without renormalising over E the loss of this collapsed router would be near 0.002.
    logits = torch.full((32, 8), -8.5, device=device)
    logits[:, 0] = -8.0
    assert route_logits(logits, 1, gating="sigmoid", impl=impl).lbl.item() > 1.4


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_instance_loss_sees_a_skew_that_the_batch_hides(impl, device):
    logits = torch.zeros(8, 2, device=device)
    logits[:4, 0] = logits[4:, 1] = 9.0
    batch = route_logits(logits, 1, impl=impl)
    instance = route_logits(logits, 1, lbl_granularity="instance", sequence_length=4, impl=impl)
    assert batch.lbl.item() == pytest.approx(1.0, abs=1e-6)
    assert instance.lbl.item() == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_ties_go_to_the_lower_expert_and_choices_are_distinct(impl, device):
    out = route_logits(torch.zeros(5, 6, device=device), 4, impl=impl)
    assert out.expert_index.tolist() == [[0, 1, 2, 3]] * 5
    assert out.counts.tolist() == [5, 5, 5, 5, 0, 0]


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_nan_row_routes_somewhere_valid_and_reaches_no_other_row(impl, gating, device):
    torch.manual_seed(5)
    logits = torch.randn(20, 6, device=device)
    clean = route_logits(logits, 3, gating=gating, impl=impl)
    logits[7] = float("nan")
    out = route_logits(logits, 3, gating=gating, impl=impl)
    rest = torch.arange(20) != 7
    assert torch.equal(out.weights[rest], clean.weights[rest])
    assert torch.equal(out.expert_index[rest], clean.expert_index[rest])
    assert sorted(out.expert_index[7].tolist()) == [0, 1, 2]
    assert int(out.counts.sum()) == 60


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 2), (1, 1, 1), (7, 3, 3), (40, 5, 1)])
def test_edge_sizes(impl, tokens, experts, top_k, device):
    logits = torch.randn(tokens, experts, device=device, requires_grad=True)
    out = route_logits(logits, top_k, impl=impl)
    assert out.weights.shape == (tokens, top_k) and out.counts.shape == (experts,)
    assert int(out.counts.sum()) == tokens * top_k
    (out.weights.sum() + out.lbl + out.z_loss).backward()
    assert logits.grad.shape == logits.shape and not logits.grad.isnan().any()


def test_many_sequences_and_blocks_of_tokens(device):
    torch.manual_seed(6)
    logits = torch.randn(600, 20, device=device)
    _, _, got, want = both(logits, top_k=2, lbl_granularity="instance", sequence_length=100)
    assert torch.equal(got.counts.cpu(), want.counts)
    # Sums of 100 probabilities: one FP32 rounding each.
    assert_within(got.lbl.cpu(), want.lbl.detach(), torch.tensor(100 * 2.0**-23).double(), "lbl")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensor_core_logits_and_gradients_are_fp32_grade(dtype):
    torch.manual_seed(11)
    x = torch.randn(512, 640, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(96, 640, device="cuda") * 0.04).to(dtype).requires_grad_()
    pull = torch.randn(512, 96, device="cuda")
    logits = router_logits(x, weight)
    logits.backward(pull)
    dx, dw, dp = x.detach().double(), weight.detach().double(), pull.double()
    # Three pieces leave an FP32 weight whole to its last bit; two leave a gradient exact to 2**-16.
    magnitude = dx.abs() @ dw.abs().t()
    assert_within(logits.cpu(), (dx @ dw.t()).cpu(), (3 * 642 * 2.0**-23 * magnitude).cpu(), "logits")
    for name, got, want, size, terms in (
        ("x gradient", x.grad, dp @ dw, dp.abs() @ dw.abs(), 96),
        ("weight gradient", weight.grad, dp.t() @ dx, dp.abs().t() @ dx.abs(), 512),
    ):
        allowed = budget(want, size, 4 * terms, got.dtype) + 2.0**-15 * size
        assert_within(got.cpu(), want.cpu(), allowed.cpu(), name)


def test_two_pieces_carry_sixteen_bits_of_a_gradient():
    grad = torch.randn(37, 12) * torch.logspace(-6, 3, 12)
    high, low = side_by_side(grad).double().split(12, dim=1)
    assert torch.equal(high, pieces(grad, 2)[0].double()) and torch.equal(low, pieces(grad, 2)[1].double())
    # Two mantissas of 8 bits, the second rounded to nearest.
    assert ((high + low - grad.double()).abs() <= 2.0**-17 * grad.double().abs()).all()


def test_logits_are_computed_in_fp32_from_bf16(device):
    torch.manual_seed(8)
    x, weight = torch.randn(6, 64, device=device).bfloat16(), torch.randn(4, 64, device=device).bfloat16()
    want = x.double() @ weight.double().t()
    logits = router_logits(x, weight)
    assert logits.dtype is torch.float32
    assert_within(logits, want, 66 * 2.0**-23 * (x.double().abs() @ weight.double().abs().t()), "logits")


def test_random_mode_draws_new_routes_each_call():
    torch.manual_seed(9)
    x, weight = torch.randn(64, 8), torch.randn(16, 8)
    first, second = (router(x, weight, 2, mode="random").expert_index for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"top_k": 5}, ValueError, "top_k must be 1 to E = 4; got 5"),
        ({"top_k": 2.0}, TypeError, r"top_k must be an int; got 2.0 \(float\)"),
        ({"gating": "relu"}, ValueError, "gating must be one of softmax, sigmoid"),
        ({"mode": "greedy"}, ValueError, "mode must be one of learned, random, uniform"),
        ({"lbl_granularity": "token"}, ValueError, "lbl_granularity must be one of"),
        ({"lbl_granularity": "instance", "sequence_length": 5}, ValueError, "sequence_length must divide T = 8; got 5"),
        ({"sequence_length": 4.0}, TypeError, r"sequence_length must be an int; got 4.0 \(float\)"),
        ({"sequence_length": True}, TypeError, r"sequence_length must be an int; got True \(bool\)"),
        ({"top_k": True}, TypeError, r"top_k must be an int; got True \(bool\)"),
        ({"top_k": None}, TypeError, r"top_k must be an int; got None \(NoneType\)"),
        ({"top_k": 0}, ValueError, "top_k must be 1 to E = 4; got 0"),
        ({"logits": torch.zeros(8, 0)}, ValueError, "top_k must be 1 to E = 0; got 2"),
        ({"noise": torch.zeros(8, 4)}, ValueError, "noise belongs to mode 'random'"),
        ({"mode": "random", "noise": torch.zeros(8, 3)}, ValueError, r"noise must have shape \[8, 4\]"),
        ({"logits": torch.zeros(8, 4).bfloat16()}, TypeError, "logits must have dtype"),
        ({"logits": torch.zeros(8)}, ValueError, "logits must have shape"),
    ],
)
def test_errors_name_what_is_wrong(change, error, words):
    args = {"logits": torch.zeros(8, 4), "top_k": 2} | change
    with pytest.raises(error, match=words):
        route_logits(args.pop("logits"), args.pop("top_k"), **args)


def test_more_sequences_than_a_launch_has_rows_are_refused(device):
    logits = torch.zeros(65536, 1, device=device)
    options = {"lbl_granularity": "instance", "sequence_length": 1}
    with pytest.raises(ValueError, match="at most 65535 sequences a call; got 65536"):
        route_logits(logits, 1, impl="triton", **options)
    assert route_logits(logits, 1, impl="reference", **options).lbl.item() == 1.0


@pytest.mark.gpu
def test_as_many_sequences_as_a_launch_has_rows():
    logits = torch.randint(0, 8, (65535, 4), device="cuda").float()  # near ties would be another test
    options = {"lbl_granularity": "instance", "sequence_length": 1}
    got = route_logits(logits, 1, **options)
    want = route_logits(logits.double(), 1, impl="reference", **options)
    assert torch.equal(got.counts, want.counts)
    # One FP32 rounding a sequence.
    assert_within(got.lbl.cpu(), want.lbl.cpu(), torch.tensor(65535 * 2.0**-23).double() * want.lbl.cpu(), "lbl")


@pytest.mark.gpu
def test_counts_need_no_host_wait_and_replay_follows_the_logits():
    torch.manual_seed(10)
    logits = torch.randn(4096, 128, device="cuda")
    route_logits(logits, 8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        route_logits(logits, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = route_logits(logits, 8)
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    want = route_logits(logits.double(), 8, impl="reference")
    assert torch.equal(out.counts, want.counts) and torch.equal(out.expert_index, want.expert_index)
