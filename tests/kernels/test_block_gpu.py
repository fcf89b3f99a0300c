"""The routed paths on a GPU: parity, host waits by their outcome in a profile, graph capture with other routes."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from moe_kernels.all_to_all import SplitExchange  # noqa: E402
from moe_kernels.block import BlockConfig, RoutedBlock  # noqa: E402
from moe_kernels.block.shared import _STREAMS  # noqa: E402
from moe_kernels.model import DevelopmentModel, TrainStep, make_optimizer, small_config  # noqa: E402
from moe_kernels.transport import VirtualTransport  # noqa: E402
from ranks import BUDGET_OUTPUT, BUDGET_WEIGHT, assert_close, run_block  # noqa: E402

from workbench.measure.capture import host_waits  # noqa: E402

pytestmark = pytest.mark.gpu
PARITY = BlockConfig(width=512, expert_width=1024, num_experts=8, top_k=2, capacity_factor=8.0, shared_width=256)


@pytest.fixture(scope="module")
def nccl():
    """A process group of one rank, so that the synchronized path runs real collectives."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()
    else:
        yield


def make(config, path="no_ep", ranks=1, **options):
    if path == "rowwise":
        options["transport"] = VirtualTransport(ranks, "cuda")
    return RoutedBlock(config, path=path, seed=5, device="cuda", **options)


def data(config, tokens, dtype=torch.float32, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    make_one = lambda: torch.randn(tokens, config.width, generator=generator, device="cuda").to(dtype)  # noqa: E731
    return make_one(), make_one()


def assert_same(got, expected, output=BUDGET_OUTPUT, weight=BUDGET_WEIGHT):
    for name in expected:
        assert_close(name, got[name], expected[name], output if name in ("output", "x") else weight)


@pytest.mark.parametrize(
    "path, ranks", [("no_ep", 1), ("synchronized", 1), ("rowwise", 1), ("rowwise", 2), ("rowwise", 4)]
)
@pytest.mark.parametrize("shared_mode", ["stream", "before_wait"])
def test_paths_equal_the_fp64_reference(nccl, path, ranks, shared_mode):
    config = replace(PARITY, shared_mode=shared_mode)
    x, d_out = data(config, 256)
    reference = RoutedBlock(config, seed=5, device="cuda", impl="reference", grouped_gemm="reference")
    expected = run_block(reference, x, d_out)
    assert_same(run_block(make(config, path, ranks), x, d_out), expected)


@pytest.mark.parametrize("gemm", ["triton", "torch", "host_loop"])
@pytest.mark.parametrize("path, ranks", [("synchronized", 1), ("rowwise", 1), ("rowwise", 4)])
def test_bf16_paths_agree(nccl, path, ranks, gemm):
    """BF16: both round rows to 8 bits at the same places, so they differ by the order of FP32 sums only."""
    x, d_out = data(PARITY, 512, torch.bfloat16)
    expected = run_block(make(PARITY, dtype=torch.bfloat16), x, d_out)
    got = run_block(make(PARITY, path, ranks, dtype=torch.bfloat16, grouped_gemm=gemm), x, d_out)
    assert_same(got, expected, 4e-3, 4e-3)


@pytest.mark.parametrize("factor", [0.25, 0.5])
def test_drops_equal_the_cpu_reference(factor):
    config = replace(PARITY, capacity_factor=factor)
    x, d_out = data(config, 128)
    block = make(config, "rowwise", 4)
    got = run_block(block, x, d_out)
    cpu = RoutedBlock(config, path="rowwise", transport=VirtualTransport(4, "cpu"), seed=5)
    cpu.load_state_dict({k: v.cpu() for k, v in block.state_dict().items()})
    expected = run_block(cpu, x.cpu(), d_out.cpu())
    assert int(block.metrics["dropped"]) == int(cpu.metrics["dropped"]) > 0
    assert_same({k: v.cpu() for k, v in got.items()}, expected)


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_tails_never_matter(poison):
    x, d_out = data(PARITY, 256, torch.bfloat16)
    block = make(PARITY, "rowwise", 2, dtype=torch.bfloat16)
    expected = run_block(block, x, d_out)
    block.zero_grad(set_to_none=True)
    for pair in block.pool._slots:
        for table in pair:
            for tensor in table.tensors:
                tensor.fill_(poison)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        got = run_block(block, x, d_out)
    finally:
        torch.use_deterministic_algorithms(False)
    for name in expected:
        assert torch.isfinite(got[name]).all(), name
        assert_close(name, got[name], expected[name], 1e-3)


@pytest.mark.parametrize("path", ["no_ep", "synchronized", "rowwise"])
@pytest.mark.parametrize("shared_mode", ["stream", "before_wait", "none"])
@pytest.mark.parametrize("passes", ["forward", "forward + backward"])
def test_waits_of_a_block(nccl, path, shared_mode, passes):
    config = replace(PARITY, shared_mode=shared_mode)
    block = make(config, path, 1, dtype=torch.bfloat16)
    x, d_out = data(config, 1024, torch.bfloat16)
    x.requires_grad_()

    def forward():
        with torch.no_grad():
            block(x)

    def both():
        block(x).backward(d_out)

    waits = host_waits(forward if passes == "forward" else both)
    print(f"{path}, shared experts {shared_mode}, {passes}: {len(waits)} host waits, {waits}")
    if path == "synchronized":
        assert [w["call"] for w in waits.waits] == ["cudaEventSynchronize"]
        assert (waits.pinned_d2h, waits.pageable_d2h) == (3, 0)
    else:
        assert (waits.waits, waits.pinned_d2h, waits.pageable_d2h) == ([], 0, 0)
    assert waits.launches > 10


@pytest.mark.parametrize("path, expected", [("rowwise", 0), ("no_ep", 0), ("synchronized", 4)])
def test_waits_of_a_training_step(nccl, path, expected):
    """Two routed blocks, two microbatches: the synchronized path waits once per routed-block forward, rowwise never."""
    options = {"transport": VirtualTransport(1, "cuda")} if path == "rowwise" else {}
    config = small_config(router_mode="learned")
    config = replace(config, width=64, heads=4, kv_heads=2, head_dim=16, vocabulary=8192, max_sequence=2048,
                     block=replace(config.block, width=64, expert_width=32, shared_width=32), lbl_coefficient=0.01,
                     z_coefficient=1e-3)  # fmt: skip
    model = DevelopmentModel(config, path=path, device="cuda", dtype=torch.bfloat16, **options)
    step = TrainStep(model, make_optimizer(model))
    batch = [tuple(torch.randint(0, 8192, (2, 2048), device="cuda") for _ in range(2)) for _ in range(2)]
    waits = host_waits(lambda: step(batch))
    print(f"{path}, training step: {len(waits)} host waits, {waits}")
    assert [w["call"] for w in waits.waits] == ["cudaEventSynchronize"] * expected
    assert waits.pageable_d2h == 0
    names = {waits.trace.names[i] for i in waits.trace.spans.name}
    assert {"block 1 forward", "block 1 backward", "microbatch 0", "microbatch 1"} <= names


def test_a_finite_check_on_the_host_would_be_seen():
    x = torch.randn(64, device="cuda")
    waits = host_waits(lambda: bool(torch.isfinite(x).all()))
    assert len(waits) == 1
    assert waits.pageable_d2h + waits.pinned_d2h == 1


def test_counts_arrive_although_their_sources_are_reused_at_once():
    exchange = SplitExchange(8, torch.device("cuda"))
    for turn in range(20):
        counts = torch.arange(8, device="cuda") + turn
        torch.cuda._sleep(2_000_000)
        exchange.start(counts)
        del counts
        churn = [torch.full((8,), -1, dtype=torch.int64, device="cuda") for _ in range(64)]
        assert exchange.wait().local_experts == [i + turn for i in range(8)]
        del churn


@pytest.mark.parametrize("ranks", [1, 4])
def test_graph_replay_follows_other_routes(ranks):
    config = replace(PARITY, capacity_factor=0.75)
    block = make(config, "rowwise", ranks, dtype=torch.bfloat16)
    x, d_out = data(config, 256, torch.bfloat16)
    x.requires_grad_()
    parameters = list(block.parameters())

    def step():
        out = block(x)
        block.aux_losses = {}
        return out, torch.autograd.grad(out, [x, *parameters], d_out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    block.freeze()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grads = step()
    loads = set()
    for seed in (1, 2, 3):
        other_x, other_d = data(config, 256, torch.bfloat16, seed)
        with torch.no_grad():
            x.copy_(other_x * seed)
            d_out.copy_(other_d)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in (out, *grads)]
        eager_out, eager_grads = step()
        for name, got, expected in zip(
            ("out", "x", *dict(block.named_parameters())), replayed, (eager_out, *eager_grads)
        ):
            assert_close(name, got, expected, 2e-3)
        loads.add(tuple(block.metrics["received_load"].tolist()))
    assert len(loads) == 3, "the routes did not change between replays"


def test_two_microbatches_in_flight():
    block = make(PARITY, "rowwise", 2, dtype=torch.bfloat16)
    batches = [data(PARITY, 256, torch.bfloat16, seed) for seed in (1, 2)]
    apart = [run_block(make(PARITY, "rowwise", 2, dtype=torch.bfloat16), x, d) for x, d in batches]
    inputs = [x.clone().requires_grad_() for x, _ in batches]
    outs = [block(x, microbatch=i) for i, x in enumerate(inputs)]
    for out, (_, d_out) in zip(outs, batches):
        out.backward(d_out)
    for i, x in enumerate(inputs):
        assert_close(f"x {i}", x.grad, apart[i]["x"], 2e-3)
    assert block.pool.high_water == 2


@pytest.mark.parametrize("shared_mode", ["stream", "before_wait"])
def test_a_compiled_block_equals_the_eager_one(shared_mode):
    """Its graph breaks at the row movement, where Dynamo must hold no stream."""
    config = replace(PARITY, shared_mode=shared_mode)
    x, d_out = data(config, 256)
    eager, block = (make(config, "rowwise") for _ in range(2))
    expected = run_block(eager, x, d_out)
    torch._dynamo.reset()
    block.compile(backend="aot_eager", dynamic=True)
    for _ in range(2):
        block.zero_grad()
        assert_same(run_block(block, x, d_out), expected)


@pytest.mark.parametrize("path", ["no_ep", "synchronized", "rowwise"])
def test_a_block_on_another_device_than_the_current_one(path):
    """The side stream forks, and the counts' event is recorded, on the block's device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    device = torch.device("cuda", 1)
    options = {"transport": VirtualTransport(1, device)} if path == "rowwise" else {}
    x, d_out = (t.to(device) for t in data(PARITY, 256))
    expected = run_block(
        RoutedBlock(PARITY, seed=5, device=device, impl="reference", grouped_gemm="reference"), x, d_out
    )
    block = RoutedBlock(PARITY, path=path, seed=5, device=device, **options)
    assert torch.cuda.current_device() == 0
    for _ in range(3):
        block.zero_grad()
        with torch.cuda.device(device):
            torch.cuda._sleep(20_000_000)
        assert_same(run_block(block, x, d_out), expected)


@pytest.mark.parametrize("path", ["no_ep", "rowwise"])
def test_the_shared_experts_stream_reads_nothing_that_was_freed(path):
    """Its backward is late; what the caller's stream allocates meanwhile must not lie over what it still reads."""
    config = replace(PARITY, shared_mode="stream")
    block = make(config, path, 1)
    x, d_out = data(config, 512)
    expected = run_block(block, x, d_out)
    for _ in range(5):
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        out = block(leaf * 1.0)  # an activation that only autograd keeps
        side = _STREAMS[x.device]
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
        out.backward(d_out)
        churn = [torch.full_like(x, float("nan")) for _ in range(32)]
        got = {"x": leaf.grad} | {n: p.grad for n, p in block.named_parameters()}
        for name in got:
            assert_close(name, got[name], expected[name], BUDGET_WEIGHT)
        del churn
