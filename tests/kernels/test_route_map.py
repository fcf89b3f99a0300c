"""Route map: the rule by a plain loop, its invariants, and the kernels against the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels.route_map import RouteMap, capacity_rows, route_map

from workbench.models import routing

FIELDS = ("dst_rank", "dst_row", "offsets", "kept", "stats")


def histogram(experts: np.ndarray, num_experts: int) -> torch.Tensor:
    flat = experts.reshape(experts.shape[0], -1)
    rows = [np.bincount(r[(r >= 0) & (r < num_experts)], minlength=num_experts) for r in flat]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def maps_of(
    experts: np.ndarray, num_experts: int, capacity: int, impl: str, device="cpu", counts=None
) -> list[RouteMap]:
    counts = (histogram(experts, num_experts) if counts is None else counts).to(device)
    ids = torch.from_numpy(experts).to(device)
    return [route_map(ids[r], counts, rank=r, capacity=capacity, impl=impl) for r in range(experts.shape[0])]


@st.composite
def cases(draw):
    ranks, local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tokens, top_k = draw(st.integers(0, 12)), draw(st.integers(1, 3))
    experts = ranks * local
    shape = (ranks, tokens, top_k)
    ids = draw(st.lists(st.integers(-1, experts), min_size=ranks * tokens * top_k, max_size=ranks * tokens * top_k))
    capacity = draw(st.integers(1, max(1, 2 * tokens * top_k)))
    return np.array(ids, dtype=np.int64).reshape(shape), experts, capacity


def route_by_loop(experts: np.ndarray, num_experts: int, capacity: int) -> routing.Routing:
    """The same rule as a plain loop over destinations, experts, sources and routes: slow, and plainly right."""
    ranks, _, top_k = experts.shape
    local = num_experts // ranks
    dst_rank = np.full(experts.shape, -1, dtype=np.int64)
    dst_row = np.full(experts.shape, -1, dtype=np.int64)
    offered = np.zeros((ranks, num_experts), dtype=np.int64)
    kept = np.zeros((ranks, num_experts), dtype=np.int64)
    offsets = np.zeros((ranks, local), dtype=np.int64)
    for destination in range(ranks):
        row = 0
        for expert in range(destination * local, (destination + 1) * local):
            for source in range(ranks):
                for route_index, chosen in enumerate(experts[source].reshape(-1)):
                    if chosen != expert:
                        continue
                    offered[source, expert] += 1
                    if row < capacity:
                        token, slot = divmod(route_index, top_k)
                        dst_rank[source, token, slot] = destination
                        dst_row[source, token, slot] = row
                        kept[source, expert] += 1
                        row += 1
            offsets[destination, expert - destination * local] = row
    return routing.Routing(dst_rank, dst_row, offered, kept, offsets, capacity)


@settings(max_examples=60)
@given(cases())
def test_reference_and_vectorised_model_equal_the_plain_loop(case):
    experts, num_experts, capacity = case
    want = route_by_loop(experts, num_experts, capacity)
    fast = routing.route(experts, num_experts, capacity)
    for name in ("dst_rank", "dst_row", "offered", "kept", "offsets"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(want, name), err_msg=name)
    for rank, got in enumerate(maps_of(experts, num_experts, capacity, "reference")):
        np.testing.assert_array_equal(got.dst_rank, want.dst_rank[rank])
        np.testing.assert_array_equal(got.dst_row, want.dst_row[rank])
        np.testing.assert_array_equal(got.offsets, want.offsets[rank])
        np.testing.assert_array_equal(got.kept, want.kept)
        offered, kept = want.offered[rank].sum(), want.kept[rank].sum()
        assert got.stats.tolist() == [offered, kept, offered - kept, want.offsets[rank, -1]]


@settings(max_examples=60)
@given(cases())
def test_invariants_kept_rows_are_dense_unique_and_conserved(case):
    experts, num_experts, capacity = case
    maps = maps_of(experts, num_experts, capacity, "reference")
    ranks = len(maps)
    accepted = received = 0
    for destination in range(ranks):
        rows = torch.cat([m.dst_row[m.dst_rank == destination] for m in maps])
        valid = int(maps[destination].offsets[-1])
        assert valid <= capacity
        assert sorted(rows.tolist()) == list(range(valid)), "destination rows form a dense prefix, each used once"
        received += int(maps[destination].stats[3])
    for rank, m in enumerate(maps):
        accepted += int(m.stats[1])
        assert int(m.stats[1]) == int((m.dst_row >= 0).sum())
        assert torch.equal(m.dst_rank >= 0, m.dst_row >= 0)
        assert int(m.stats[0]) == int(m.stats[1]) + int(m.stats[2])
        ids = torch.from_numpy(experts[rank])
        kept = m.dst_rank >= 0
        assert torch.equal(m.dst_rank[kept].long(), ids[kept] // (num_experts // ranks))
    assert accepted == received


def test_overflow_drops_the_highest_expert_then_the_highest_source_then_the_latest_route():
    # Two ranks, two experts each; everything goes to rank 0. Rows wanted: expert 0: 2 + 1, expert 1: 2 + 3.
    experts = np.array([[[0], [1], [0], [1]], [[1], [1], [0], [1]]])
    first, second = maps_of(experts, 4, 6, "reference")
    assert first.dst_row[:, 0].tolist() == [0, 3, 1, 4]
    assert second.dst_row[:, 0].tolist() == [5, -1, 2, -1]
    assert first.offsets.tolist() == [3, 6]
    assert (int(first.stats[2]), int(second.stats[2])) == (0, 2)


RNG = np.random.default_rng(7)
CASES = {
    "several blocks": (RNG.integers(0, 6, (2, 150, 3)), 6, 500),
    "tight capacity": (RNG.integers(0, 6, (2, 150, 3)), 6, 113),
    "invalid ids": (RNG.integers(-3, 12, (3, 40, 2)), 6, 1000),
    "one rank": (RNG.integers(0, 5, (1, 90, 4)), 5, 250),
    "K = 1, L = 1": (RNG.integers(0, 3, (3, 30, 1)), 3, 20),
    "all to one expert": (np.full((2, 64, 2), 3), 4, 1000),
    "all to one rank": (RNG.integers(2, 4, (2, 64, 2)), 4, 100),
    "capacity 1": (RNG.integers(0, 4, (2, 9, 2)), 4, 1),
    "no tokens": (np.zeros((2, 0, 2), dtype=np.int64), 4, 1),
    "id beyond int32": (np.array([[[2**32, 1], [0, 2**32 + 1]]]), 2, 8),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference(name, device):
    experts, num_experts, capacity = CASES[name]
    want = maps_of(experts, num_experts, capacity, "reference")
    got = maps_of(experts, num_experts, capacity, "triton", device)
    for rank, (w, g) in enumerate(zip(want, got)):
        for field in FIELDS:
            assert torch.equal(getattr(w, field), getattr(g, field).cpu()), f"rank {rank}, {field}"


def test_scan_carries_over_more_blocks_than_one_step_holds(device, monkeypatch):
    pytest.importorskip("triton")
    import moe_kernels.route_map.triton as backend

    monkeypatch.setattr(backend, "SCAN", 2)
    experts, num_experts, capacity = RNG.integers(0, 6, (1, 400, 3)), 6, 1100
    (want,) = maps_of(experts, num_experts, capacity, "reference")
    (got,) = maps_of(experts, num_experts, capacity, "triton", device)
    assert torch.equal(got.dst_row.cpu(), want.dst_row)


def test_kernels_take_int32_ids_and_counts_by_source_and_destination(device):
    experts = RNG.integers(0, 6, (2, 20, 2))
    counts = histogram(experts, 6).to(device)
    ids = torch.from_numpy(experts[1]).to(device)
    a = route_map(ids.int(), counts.view(2, 2, 3), rank=1, capacity=30, impl="triton")
    b = route_map(ids, counts, rank=1, capacity=30, impl="triton")
    for field in FIELDS:
        assert torch.equal(getattr(a, field), getattr(b, field))


def test_wrong_counts_never_send_a_row_outside_the_buffer(device):
    experts = np.zeros((1, 300, 1), dtype=np.int64)
    counts = torch.tensor([[10, 4]])
    (got,) = maps_of(experts, 2, 8, "triton", device, counts)
    assert int(got.dst_row.max()) == 7 and int((got.dst_row >= 0).sum()) == 8


def test_operator_has_a_fake_for_compile():
    pytest.importorskip("triton")
    import moe_kernels.route_map.triton  # noqa: F401  (registers the operator)

    experts = RNG.integers(0, 6, (2, 20, 2))
    args = (torch.from_numpy(experts[0]), histogram(experts, 6), 0, 30)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.moe_kernels.route_map(*[mode.from_tensor(a) if torch.is_tensor(a) else a for a in args])
    real = route_map(args[0], args[1], rank=0, capacity=30, impl="reference")
    for field, tensor in zip(FIELDS, fake):
        want = getattr(real, field)
        assert (tensor.shape, tensor.dtype) == (want.shape, want.dtype), field


@pytest.mark.parametrize(
    ("tokens", "top_k", "factor", "rows"), [(16384, 8, 1.25, 163840), (3, 1, 0.25, 1), (0, 8, 1.25, 1), (5, 2, 0.33, 4)]
)
def test_capacity_is_a_ceiling_of_at_least_one(tokens, top_k, factor, rows):
    assert capacity_rows(tokens, top_k, factor) == routing.capacity_rows(tokens, top_k, factor) == rows


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((3.5, 2, 1.0), r"tokens must be an int; got 3.5 \(float\)"),
        ((None, 2, 1.0), r"tokens must be an int; got None \(NoneType\)"),
        ((8, True, 1.0), r"top_k must be an int; got True \(bool\)"),
        ((8, 2, "1"), r"capacity_factor must be a number; got '1' \(str\)"),
        ((8, 2, True), r"capacity_factor must be a number; got True \(bool\)"),
    ],
)
def test_capacity_refuses_what_is_no_number(args, words):
    with pytest.raises(TypeError, match=words):
        capacity_rows(*args)


def test_more_routes_than_int32_counts_are_refused():
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(2**28, 8)  # fake strides: 2**31 routes without their memory
    counts = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 2147483647 routes; got 2147483648"):
        route_map(ids, counts, rank=0, capacity=8)
    with pytest.raises(ValueError, match=r"capacity must be 1 to 2147483647 \(rows are int32\); got 2147483648"):
        route_map(ids[:1], counts, rank=0, capacity=2**31)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_capacity_refuses_bad_factors(factor):
    with pytest.raises(ValueError, match="capacity_factor"):
        capacity_rows(8, 2, factor)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"expert_index": torch.zeros(4, 2)}, TypeError, "expert_index must have dtype torch.int32 or torch.int64"),
        ({"expert_index": torch.zeros(4, dtype=torch.int64)}, ValueError, r"expert_index must have shape \[any, any\]"),
        ({"counts": torch.zeros(2, 4)}, TypeError, "counts must have dtype torch.int64"),
        ({"counts": torch.zeros(4, dtype=torch.int64)}, ValueError, r"counts must have shape \[R, E\]"),
        ({"counts": torch.zeros(2, 5, dtype=torch.int64)}, ValueError, "multiple of R"),
        ({"rank": 2}, ValueError, "rank must be 0 to R - 1 = 1; got 2"),
        ({"rank": 0.5}, TypeError, r"rank must be an int; got 0.5 \(float\)"),
        ({"rank": True}, TypeError, r"rank must be an int; got True \(bool\)"),
        ({"capacity": 0}, ValueError, "capacity must be 1 to"),
        ({"capacity": 3.7}, TypeError, r"capacity must be an int; got 3.7 \(float\)"),
        ({"capacity": torch.tensor(8)}, TypeError, r"capacity must be an int; got tensor\(8\) \(Tensor\)"),
        ({"impl": "fast"}, ValueError, "impl must be one of triton, reference; got 'fast'"),
    ],
)
def test_errors_name_what_is_wrong(change, error, words):
    args = {
        "expert_index": torch.zeros(4, 2, dtype=torch.int64),
        "counts": torch.zeros(2, 4, dtype=torch.int64),
        "rank": 0,
        "capacity": 8,
        "impl": "reference",
    } | change
    ids, counts = args.pop("expert_index"), args.pop("counts")
    with pytest.raises(error, match=words):
        route_map(ids, counts, **args)


@pytest.mark.gpu
def test_full_size_equals_the_model_in_three_launches_without_a_host_wait():
    from workbench.measure.timing import launches

    experts = routing.skewed_experts(1, 16384, 8, 128, 0.5, np.random.default_rng(1))
    ids, counts = torch.from_numpy(experts).cuda(), histogram(experts, 128).cuda()
    capacity = 120_000

    def call() -> RouteMap:
        return route_map(ids[0], counts, rank=0, capacity=capacity)

    got = call()
    want = routing.route(experts, 128, capacity)
    np.testing.assert_array_equal(got.dst_row.cpu(), want.dst_row[0])
    np.testing.assert_array_equal(got.offsets.cpu(), want.offsets[0])
    assert int(got.stats[2]) == want.dropped > 0
    assert launches(call) <= 3
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
