"""RoutedBlock: every path computes one function, drops follow the rule, and no poison or neighbour leaks in."""

import math

import pytest

torch = pytest.importorskip("torch")
from moe_kernels.block import BlockConfig, RoutedBlock  # noqa: E402
from moe_kernels.router import RouterOutput, router_logits  # noqa: E402
from moe_kernels.transport import SymmetricPool, VirtualTransport  # noqa: E402
from ranks import BUDGET_OUTPUT, BUDGET_WEIGHT, assert_close, relative_error, run_block  # noqa: E402
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # noqa: E402

PARITY = BlockConfig(width=512, expert_width=1024, num_experts=8, top_k=2, capacity_factor=8.0)
SMALL = BlockConfig(width=16, expert_width=8, num_experts=8, top_k=2, capacity_factor=8.0, shared_width=12)


def rowwise(config: BlockConfig, ranks: int, cls=RoutedBlock, **options) -> RoutedBlock:
    return cls(config, path="rowwise", transport=VirtualTransport(ranks, "cpu"), seed=5, **options)


def data(config: BlockConfig, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, config.width, generator=generator) for _ in range(2))


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert_close(name, got[name], expected[name], BUDGET_OUTPUT if name in ("output", "x") else BUDGET_WEIGHT)


class Steered(RoutedBlock):
    """A block whose experts are chosen by the test; weights stay learned."""

    steer = None

    def _route(self, x):
        index = self.steer(x.shape[0])
        scores = router_logits(x, self.router_weight).softmax(-1).gather(1, index.long())
        counts = torch.zeros(self.config.num_experts, dtype=torch.int64)
        counts.scatter_add_(0, index.long().flatten(), torch.ones(index.numel(), dtype=torch.int64))
        zero = x.new_zeros(())
        return RouterOutput(scores / scores.sum(-1, keepdim=True), index.to(torch.int32), counts, zero, zero)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_virtual_ranks_equal_one_rank(ranks):
    x, d_out = data(PARITY, 64)
    expected = run_block(RoutedBlock(PARITY, seed=5), x, d_out)
    assert_same(run_block(rowwise(PARITY, ranks), x, d_out), expected)


@pytest.mark.parametrize("shared_mode", ["stream", "before_wait", "none"])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_paths_agree_with_every_shared_mode_and_gating(shared_mode, gating):
    config = BlockConfig(
        width=16, expert_width=8, num_experts=8, top_k=3, capacity_factor=8.0, shared_width=12,
        shared_mode=shared_mode, gating=gating, restore_scale=True,
    )  # fmt: skip
    x, d_out = data(config, 24)
    expected = run_block(RoutedBlock(config, seed=5), x, d_out)
    assert ("shared_down" in expected) == (shared_mode != "none")
    assert_same(run_block(RoutedBlock(config, path="synchronized", seed=5), x, d_out), expected)
    assert_same(run_block(rowwise(config, 2), x, d_out), expected)


def test_host_loop_computes_the_same():
    x, d_out = data(SMALL, 24)
    expected = run_block(RoutedBlock(SMALL, seed=5), x, d_out)
    for path in ("no_ep", "synchronized"):
        assert_same(run_block(RoutedBlock(SMALL, path=path, seed=5, grouped_gemm="host_loop"), x, d_out), expected)
    assert_same(run_block(rowwise(SMALL, 2, grouped_gemm="host_loop"), x, d_out), expected)


def kept_routes(index: torch.Tensor, ranks: int, experts: int, capacity: int) -> torch.Tensor:
    """Plain-loop keep rule over [R, T, K] expert ids: fill each destination in (expert, source, token, k) order."""
    local = experts // ranks
    keep = torch.zeros_like(index, dtype=torch.bool)
    for destination in range(ranks):
        used = 0
        for expert in range(destination * local, (destination + 1) * local):
            for source in range(ranks):
                for token, k in (index[source] == expert).nonzero().tolist():
                    keep[source, token, k] = used < capacity
                    used += 1
    return keep


@pytest.mark.parametrize("factor", [0.25, 0.5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dropped_routes_add_nothing_and_the_rest_is_exact(ranks, factor):
    config = BlockConfig(width=16, expert_width=8, num_experts=8, top_k=2, capacity_factor=factor)
    x, d_out = data(config, 8 * ranks)
    block = rowwise(config, ranks)
    got = run_block(block, x, d_out)

    weights = {n: p.detach().double().requires_grad_() for n, p in block.named_parameters()}
    x64 = x.double().requires_grad_()
    scores, index = (x64 @ weights["router_weight"].t()).softmax(-1).topk(2, dim=-1)
    scores = scores / scores.sum(-1, keepdim=True)
    capacity = math.ceil(factor * 8 * 2)
    keep = kept_routes(index.view(ranks, 8, 2), ranks, 8, capacity).view(-1, 2)
    gate, up = torch.einsum("td,edf->tef", x64, weights["up_gate"]).chunk(2, dim=-1)
    every = torch.einsum("tef,efd->ted", torch.nn.functional.silu(gate) * up, weights["down"])
    chosen = every.gather(1, index[..., None].expand(-1, -1, 16))
    out = (chosen * (scores * keep)[..., None]).sum(1)
    out.backward(d_out.double())

    assert 0 < int((~keep).sum()) < keep.numel()
    expected = {"output": out.detach(), "x": x64.grad} | {n: w.grad for n, w in weights.items()}
    assert_same(got, expected)
    assert int(block.metrics["offered"]) == keep.numel()
    assert int(block.metrics["accepted"]) == int(keep.sum())
    assert int(block.metrics["dropped"]) == int((~keep).sum())
    by_source = (~keep).view(ranks, -1).sum(1)
    assert block.metrics["dropped_by_source"].tolist() == by_source.tolist()
    assert block.metrics["received_load"].sum() == keep.sum()
    all_dropped = ~keep.any(1)
    if all_dropped.any():
        assert (got["output"][all_dropped] == 0).all()
        assert (got["x"][all_dropped] == 0).all()


def test_a_token_whose_routes_all_drop_outputs_zero_and_gets_zero_gradient():
    config = BlockConfig(width=16, expert_width=8, num_experts=8, top_k=2, capacity_factor=0.05)
    x, d_out = data(config, 16)
    got = run_block(rowwise(config, 1), x, d_out)
    gone = got["output"].abs().sum(1) == 0
    assert gone.sum() >= 14
    assert (got["x"][gone] == 0).all()
    assert torch.isfinite(got["router_weight"]).all()


@pytest.mark.parametrize("poison", [float("nan"), 1e30, -1e30])
def test_rows_beyond_the_valid_prefix_never_matter(poison):
    """Symmetric tails are filled with poison; uninitialised memory is NaN through torch's deterministic fill."""
    x, d_out = data(SMALL, 24)
    block = rowwise(SMALL, 2)
    expected = run_block(block, x, d_out)
    block.zero_grad(set_to_none=True)
    for pair in block.pool._slots:
        for table in pair:
            for tensor in table.tensors:
                tensor.fill_(poison)
    torch.use_deterministic_algorithms(True)
    try:
        assert math.isnan(torch.empty(1).item())
        got = run_block(block, x, d_out)
    finally:
        torch.use_deterministic_algorithms(False)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


STEERS = {
    "one expert takes all, seven none": lambda t: torch.tensor([[5]]).expand(t, 1),
    "one rank takes all": lambda t: torch.arange(t)[:, None] % 2,
    "last rank takes all": lambda t: 6 + torch.arange(t)[:, None] % 2,
}


@pytest.mark.parametrize("name", STEERS)
def test_skewed_loads_with_one_choice(name):
    config = BlockConfig(width=16, expert_width=8, num_experts=8, top_k=1, capacity_factor=8.0)
    x, d_out = data(config, 24)
    one, four = Steered(config, seed=5), rowwise(config, 4, Steered)
    one.steer = four.steer = STEERS[name]
    torch.use_deterministic_algorithms(True)
    try:
        expected, got = run_block(one, x, d_out), run_block(four, x, d_out)
    finally:
        torch.use_deterministic_algorithms(False)
    # A single choice has weight 1 whatever the router says: its gradient is rounding noise around 0.
    for result in (expected, got):
        assert result.pop("router_weight").abs().max() < 1e-5
    assert_same(got, expected)
    idle = four.metrics["received_load"] == 0
    assert idle.sum() >= 6
    for weight in ("up_gate", "down"):
        assert (got[weight][idle] == 0).all(), f"{weight}: experts without tokens need a gradient of exactly 0"


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_one_expert_per_rank_and_odd_token_counts(tokens):
    config = BlockConfig(width=16, expert_width=8, num_experts=4, top_k=2, capacity_factor=8.0)
    x, d_out = data(config, 4 * tokens)
    expected = run_block(RoutedBlock(config, seed=5), x, d_out)
    assert_same(run_block(rowwise(config, 4), x, d_out), expected)
    assert expected["output"].shape == (4 * tokens, 16)


def test_nan_in_one_row_stays_there():
    x, d_out = data(SMALL, 24)
    clean = run_block(rowwise(SMALL, 2), x, d_out)
    bad_x, bad_d = x.clone(), d_out.clone()
    bad_x[5], bad_d[7] = float("nan"), float("nan")
    others = [i for i in range(24) if i not in (5, 7)]
    block = rowwise(SMALL, 2)
    forward = run_block(block, bad_x, d_out)
    assert torch.isnan(forward["output"][5]).all()
    assert_close("output", forward["output"][others], clean["output"][others], 1e-6)
    backward = run_block(rowwise(SMALL, 2), x, bad_d)
    assert torch.isnan(backward["x"][7]).any()
    assert_close("x", backward["x"][others], clean["x"][others], 1e-6)


def test_two_microbatches_in_flight_keep_their_buffers():
    block = rowwise(SMALL, 2)
    batches = [data(SMALL, 24, seed) for seed in (1, 2)]
    apart = [run_block(rowwise(SMALL, 2), x, d) for x, d in batches]
    inputs = [x.clone().requires_grad_() for x, _ in batches]
    outs = [block(x, microbatch=i) for i, x in enumerate(inputs)]
    assert block.pool.high_water == 2
    for out, (_, d_out) in zip(outs, batches):
        out.backward(d_out)
    for i, x in enumerate(inputs):
        assert_close(f"output {i}", outs[i].detach(), apart[i]["output"], 1e-6)
        assert_close(f"x {i}", x.grad, apart[i]["x"], 1e-6)
    assert_close("down", block.down.grad, apart[0]["down"] + apart[1]["down"], 1e-5)
    assert block.pool.held == ()


def test_a_microbatch_number_in_flight_cannot_be_used_twice():
    block = rowwise(SMALL, 2)
    x, _ = data(SMALL, 24)
    block(x.requires_grad_())
    with pytest.raises(RuntimeError, match="already holds a lease"):
        block(x)


def test_a_forward_without_gradients_gives_its_lease_back():
    block = rowwise(SMALL, 2)
    x, _ = data(SMALL, 24)
    with torch.no_grad():
        first = block(x)
        assert torch.equal(block(x), first)
    assert block.pool.held == ()
    assert block.pool.slots == 1


def test_backward_twice_raises():
    block = rowwise(SMALL, 2)
    x, d_out = data(SMALL, 24)
    out = block(x.requires_grad_())
    out.backward(d_out, retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran before"):
        out.backward(d_out)


@pytest.mark.parametrize("early_stop", [False, True])
def test_recompute_uses_the_same_lease_and_counts_metrics_once(early_stop):
    x, d_out = data(SMALL, 24)
    expected = run_block(rowwise(SMALL, 2), x, d_out)
    block = rowwise(SMALL, 2)
    x = x.requires_grad_()
    # A recomputation that stops early never reaches the metrics: only the whole one can count them twice. The early one
    # leaves the block through an exception, which must keep the lease.
    with set_checkpoint_early_stop(early_stop):
        out = checkpoint(block, x, use_reentrant=False, context_fn=block.checkpoint_contexts)
    records = dict(block._records)
    out.backward(d_out)
    assert block._records == records
    assert block.pool.slots == 1
    assert block.pool.held == ()
    assert int(block.metrics["offered"]) == 48
    assert_close("output", out.detach(), expected["output"], 1e-6)
    assert_close("x", x.grad, expected["x"], 1e-6)
    assert_close("up_gate", block.up_gate.grad, expected["up_gate"], 1e-6)


def test_unequal_tokens_raise_before_and_after_the_dry_run():
    block = rowwise(SMALL, 2)
    with pytest.raises(
        ValueError, match=r"tokens per rank \(T\) must be equal on all 2 ranks, got rank 0: 8, rank 1: 9"
    ):
        block.forward_ranks([torch.zeros(8, 16), torch.zeros(9, 16)])
    with torch.no_grad():
        block(torch.zeros(16, 16))
        block.freeze()
        block(torch.zeros(16, 16))
        with pytest.raises(ValueError, match="all ranks agreed on 8 per rank in the dry run"):
            block(torch.zeros(18, 16))


def test_freezing_bounds_the_microbatches_in_flight():
    block = rowwise(SMALL, 2)
    x, _ = data(SMALL, 24)
    block(x.requires_grad_(), microbatch=0).sum().backward()
    block.freeze()
    block(x, microbatch=0)
    with pytest.raises(RuntimeError, match="frozen at 1 slots"):
        block(x, microbatch=1)


def test_metrics_add_up():
    block = rowwise(SMALL, 4)
    x, _ = data(SMALL, 24)
    with torch.no_grad():
        block(x)
    metrics = block.metrics
    assert int(metrics["offered"]) == int(metrics["accepted"]) == 48
    assert metrics["per_expert_load"].tolist() == metrics["received_load"].tolist()
    assert torch.allclose(metrics["capacity_use"], metrics["received_load"].view(4, 2).sum(1) / block.capacity(6))
    assert 0.5 <= float(metrics["confidence"]) < 1


def test_weights_are_the_same_whatever_the_number_of_ranks():
    whole = RoutedBlock(SMALL, seed=7)
    assert not torch.equal(whole.down[0], whole.down[1])
    other = RoutedBlock(SMALL, seed=8)
    assert relative_error(other.down, whole.down) > 0.1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"path": "rowise"}, "path must be one of no_ep, synchronized, rowwise"),
        ({"path": "rowwise"}, "needs a transport"),
        ({"path": "no_ep", "transport": VirtualTransport(1, "cpu")}, "takes no transport"),
        ({"path": "rowwise", "transport": VirtualTransport(3, "cpu")}, "8 experts cannot be split evenly over 3 ranks"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RoutedBlock(SMALL, **options)


def test_bad_inputs_are_named():
    block = rowwise(SMALL, 2)
    with pytest.raises(ValueError, match=r"x must have shape \[any, 16\]; got \[4, 8\]"):
        block(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="5 tokens do not split evenly over 2"):
        block(torch.zeros(5, 16))
    with pytest.raises(ValueError, match="top_k"):
        BlockConfig(width=16, expert_width=8, num_experts=2, top_k=3)


def test_blocks_may_share_a_pool():
    transport = VirtualTransport(2, "cpu")
    pool = SymmetricPool(transport, 16, torch.float32)
    options = {"path": "rowwise", "transport": transport, "pool": pool}
    first, second = (RoutedBlock(SMALL, index=i, seed=i, **options) for i in range(2))
    x, d_out = data(SMALL, 24)
    chained = torch.nn.Sequential(RoutedBlock(SMALL, seed=0), RoutedBlock(SMALL, seed=1))
    expected_x, x = x.clone().requires_grad_(), x.requires_grad_()
    chained(expected_x).backward(d_out)
    second(first(x)).backward(d_out)
    assert pool.high_water == 2
    assert pool.high_water_by_block == {0: 1, 1: 1}
    assert_close("x", x.grad, expected_x.grad, BUDGET_OUTPUT)


@pytest.mark.parametrize("trained", ["router_weight", "down", "shared_up_gate", "x"])
def test_frozen_weights_leave_the_other_gradients_as_they_were(trained):
    x, d_out = data(SMALL, 24)
    expected = run_block(rowwise(SMALL, 2), x, d_out)
    block = rowwise(SMALL, 2)
    block.requires_grad_(False)
    leaf = x.clone().requires_grad_() if trained == "x" else block.get_parameter(trained).requires_grad_()
    out = block(leaf if trained == "x" else x)
    out.backward(d_out)
    assert_close(trained, leaf.grad, expected[trained], 1e-6)
    assert [n for n, p in block.named_parameters() if p.grad is not None] == [n for n in [trained] if n != "x"]
    assert block.pool.held == ()
    block(x.clone().requires_grad_())


def fails(*args, **options):
    raise MemoryError("no room")


@pytest.mark.parametrize("where", ["dispatch", "grouped_gemm", "swiglu", "combine", "record", "join"])
def test_an_error_in_the_forward_gives_the_lease_back(monkeypatch, where):
    import moe_kernels.block.rowwise as module

    block = rowwise(SMALL, 2)
    x, d_out = data(SMALL, 24)
    expected = run_block(block, x, d_out)
    block.zero_grad()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        if where in ("record", "join"):
            patch.setattr(block, {"record": "_record", "join": "_joined"}[where], fails)
        else:
            patch.setattr(module, where, fails)
        block(x.clone().requires_grad_())
    assert block.pool.held == ()
    assert_same(run_block(block, x, d_out), expected)


@pytest.mark.parametrize("where", ["combine_backward", "grouped_gemm_wgrad", "swiglu_backward", "combine"])
def test_an_error_in_the_backward_gives_the_lease_back(monkeypatch, where):
    import moe_kernels.block.rowwise as module

    block = rowwise(SMALL, 2)
    x, d_out = data(SMALL, 24)
    expected = run_block(block, x, d_out)
    block.zero_grad()
    out = block(x.clone().requires_grad_())
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(module, where, fails)
        out.backward(d_out, retain_graph=True)
    assert block.pool.held == ()
    with pytest.raises(RuntimeError, match="its buffers are given back"):
        out.backward(d_out)
    block.zero_grad()
    assert_same(run_block(block, x, d_out), expected)


def test_an_error_in_the_recomputation_gives_the_lease_back_once(monkeypatch):
    import moe_kernels.block.rowwise as module

    block = rowwise(SMALL, 2)
    x, d_out = data(SMALL, 24)
    out = checkpoint(block, x.requires_grad_(), use_reentrant=False, context_fn=block.checkpoint_contexts)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(module, "dispatch", fails)
        out.backward(d_out)
    assert block.pool.held == () and len(block.pool._free) == 1
    assert not block._recomputing


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"width": 16.5}, TypeError, r"width must be an int; got 16.5 \(float\)"),
        ({"top_k": True}, TypeError, r"top_k must be an int; got True \(bool\)"),
        ({"num_experts": None}, TypeError, r"num_experts must be an int; got None \(NoneType\)"),
        ({"num_experts": 0}, ValueError, "num_experts must be at least 1, got 0"),
        ({"shared_width": 2.5}, TypeError, r"shared_width must be an int; got 2.5 \(float\)"),
        ({"capacity_factor": None}, TypeError, r"capacity_factor must be a number; got None \(NoneType\)"),
        ({"capacity_factor": math.inf}, ValueError, "capacity_factor > 0; got 1, 2, inf"),
        ({"sequence_length": 0}, ValueError, "sequence_length must be at least 1 or None, got 0"),
        ({"sequence_length": 2.0}, TypeError, r"sequence_length must be an int; got 2.0 \(float\)"),
    ],
)
def test_bad_sizes_are_named(change, error, words):
    with pytest.raises(error, match=words):
        BlockConfig(**{"width": 16, "expert_width": 8, "num_experts": 8, "top_k": 2} | change)


@pytest.mark.parametrize("path", ["no_ep", "rowwise"])
def test_rows_of_another_dtype_or_device_are_named(path):
    block = rowwise(SMALL, 1) if path == "rowwise" else RoutedBlock(SMALL)
    for x, error, words in (
        (torch.zeros(4, 16).bfloat16(), TypeError, r"x must have dtype torch\.float32; got torch\.bfloat16"),
        (torch.zeros(4, 16, device="meta"), ValueError, "x must be on cpu; got meta"),
        ([1.0], TypeError, r"x must be a torch\.Tensor; got list"),
    ):
        with pytest.raises(error, match=words):
            block(x)
    with pytest.raises(TypeError, match=r"transport must be a Transport or None; got str"):
        RoutedBlock(SMALL, path="rowwise", transport="nvshmem")


@pytest.mark.parametrize("world_size", [2.0, True, None])
def test_a_number_of_ranks_that_is_no_integer_is_named(world_size):
    with pytest.raises(TypeError, match="world_size must be an int"):
        VirtualTransport(world_size, "cpu")


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("path", ["no_ep", "synchronized"])
def test_recompute_without_leases(path, early_stop):
    x, d_out = data(SMALL, 24)
    expected = run_block(RoutedBlock(SMALL, path=path, seed=5), x, d_out)
    block = RoutedBlock(SMALL, path=path, seed=5)
    x = x.requires_grad_()
    with set_checkpoint_early_stop(early_stop):
        out = checkpoint(block, x, use_reentrant=False, context_fn=block.checkpoint_contexts)
    out.backward(d_out)
    assert_close("x", x.grad, expected["x"], 1e-6)
    assert_close("up_gate", block.up_gate.grad, expected["up_gate"], 1e-6)
    assert int(block.metrics["offered"]) == 48
    block(x)
