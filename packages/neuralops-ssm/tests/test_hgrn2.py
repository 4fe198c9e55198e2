"""hgrn2_scan and hgrn2_step: against the oracle, and what users do with them."""

import copy
import itertools
import math
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import neuralops.core
from neuralops.core.suitability import INTERPRETING
from neuralops.core.testing import (
    TOLERANCES,
    check_sample,
    evaluate,
    make_sample,
    measure,
    opcheck_calls,
    poisoned_memory,
)
from neuralops.core.testing.fixtures import BACKENDS, DEVICE, sample_matrix, samples
from neuralops.ssm import hgrn2_scan, hgrn2_step
from neuralops.ssm.hgrn2 import triton_impl
from neuralops.ssm.hgrn2.op import OPERATOR

ON_BOTH = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def split(monkeypatch):
    """Tiles so small that even short sequences are split into parts of several tiles."""
    tiles = triton_impl.Tiles(block_d=16, lanes=2, run=8, warps=1, stages=1)
    for name in ("FORWARD", "BACKWARD", "LEAN"):
        monkeypatch.setattr(triton_impl, name, tiles)
    monkeypatch.setattr(triton_impl, "multiprocessors", lambda device: 64)


def inputs(batch=2, length=65, channels=5, dtype=torch.float32, seed=0, states=None):
    generator = torch.Generator().manual_seed(seed)
    f = torch.rand(batch, length, channels, generator=generator)
    iv = torch.randn(batch, length, channels, generator=generator)
    state = torch.randn(states or batch, channels, generator=generator)
    return f.to(DEVICE, dtype), iv.to(DEVICE, dtype), state.to(DEVICE)


def assert_matches(results, oracle, dtype=torch.float32):
    for name, result in results.items():
        tolerance = TOLERANCES[dtype]
        bound = tolerance.gradient if name.startswith("grad") else tolerance.output
        ratio, _ = measure(result, oracle[name])
        assert ratio <= bound, f"{name}: {ratio:.2e} above {bound:.2e}"


# --- Against the oracle ---------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "dtype", "sample"), sample_matrix(OPERATOR))
def test_matches_oracle(backend, dtype, sample):
    with poisoned_memory():
        errors = check_sample(OPERATOR, sample, backend=backend, device=DEVICE, dtype=dtype)
    assert [str(error) for error in errors if not error.passed] == []


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize(
    "options", list(itertools.product((None, 0.7), (False, True), (False, True))), ids=str
)
def test_split_along_the_sequence(backend, options):
    clip, reverse, packed = options
    boundaries = torch.tensor([0, 0, 15, 15, 16, 80, 100], device=DEVICE)
    f, iv, state = inputs(1, 110, 5, states=6 if packed else 1)
    arguments = (
        (f, iv, clip),
        {
            "reverse": reverse,
            "initial_state": state,
            "return_final_state": True,
            "cu_seqlens": boundaries if packed else None,
        },
    )
    assert triton_impl._split(triton_impl.LEAN, f)[1] > 3
    oracle = evaluate(hgrn2_scan, arguments, dtype=torch.float64, backend="reference")
    with poisoned_memory():
        results = evaluate(hgrn2_scan, arguments, backend=backend)
    assert_matches(results, oracle)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("clip", (None, 0.7), ids=str)
@pytest.mark.parametrize("reverse", (False, True), ids=("forward", "reverse"))
@pytest.mark.parametrize("gate", (0.0, 1e-5, 1e-3, 0.3, 1.0), ids=str)
def test_parts_whose_gates_multiply_to_zero(backend, clip, reverse, gate, monkeypatch):
    """A part is composed no further than its gates let its first tokens reach its end."""
    monkeypatch.setattr(triton_impl, "multiprocessors", lambda device: 1)
    _, iv, state = inputs(1, 130, 5)
    f = torch.full_like(iv, gate)
    f[:, ::7, ::2] = 0.9
    arguments = (
        (f, iv, clip),
        {"reverse": reverse, "initial_state": state, "return_final_state": True},
    )
    part, splits = triton_impl._split(triton_impl.LEAN, f)
    assert part >= 32 and splits >= 3
    oracle = evaluate(hgrn2_scan, arguments, dtype=torch.float64, backend="reference")
    with poisoned_memory():
        results = evaluate(hgrn2_scan, arguments, backend=backend)
    assert_matches(results, oracle)


def test_reference_is_the_closed_form():
    f, iv, _ = inputs(1, 12, 3, torch.float64)
    expected = torch.zeros_like(iv)
    for t, s in itertools.product(range(12), range(12)):
        if s <= t:
            expected[0, t] += f[0, s + 1 : t + 1].prod(0) * iv[0, s]
    torch.testing.assert_close(hgrn2_scan(f, iv, backend="reference"), expected)


@ON_BOTH
def test_ones_give_a_plain_sum_and_zeros_restart(backend):
    iv = torch.randn(1, 100, 4, device=DEVICE)
    ones = torch.ones_like(iv)
    ratio, _ = measure(hgrn2_scan(ones, iv, backend=backend), iv.double().cumsum(1))
    assert ratio < 1e-6
    restarts = ones.clone()
    restarts[:, [0, 30, 31, 64]] = 0.0
    h = hgrn2_scan(restarts, iv, backend=backend)
    pieces = [p.double().cumsum(1) for p in iv.split([30, 1, 33, 36], dim=1)]
    assert measure(h, torch.cat(pieces, 1))[0] < 1e-6
    assert torch.equal(h, hgrn2_scan(restarts.log(), iv, log_decay=True, backend=backend))


@ON_BOTH
def test_very_negative_log_gates_are_finite(backend):
    f = torch.full((1, 65, 8), -1e4, device=DEVICE).requires_grad_()
    iv = torch.randn(1, 65, 8, device=DEVICE)
    with poisoned_memory():
        h = hgrn2_scan(f, iv, log_decay=True, backend=backend)
        (gradient,) = torch.autograd.grad(h.sum(), f)
    assert torch.equal(h, iv)
    assert torch.equal(gradient, torch.zeros_like(f))


@ON_BOTH
def test_gradient_of_a_zero_gate_is_the_recurrences_own(backend):
    f = torch.zeros(1, 2, 1, device=DEVICE, requires_grad=True)
    iv = torch.tensor([[[3.0], [5.0]]], device=DEVICE)
    (gradient,) = torch.autograd.grad(hgrn2_scan(f, iv, backend=backend).sum(), f)
    assert gradient.flatten().tolist() == [0.0, 3.0]


@ON_BOTH
def test_clip_is_inside_the_recurrence(backend):
    f = torch.ones(1, 4, 1, device=DEVICE)
    iv = torch.tensor([5.0, -0.5, -3.0, 0.25], device=DEVICE).view(1, 4, 1).requires_grad_()
    state = torch.full((1, 1), 9.0, device=DEVICE)
    h = hgrn2_scan(f, iv, 1.0, initial_state=state, backend=backend)
    assert h.flatten().tolist() == [1.0, 0.5, -1.0, -0.75]
    (gradient,) = torch.autograd.grad(h.sum(), iv)
    assert gradient.flatten().tolist() == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("clip", [None, 0, 0.0, -1, -0.5])
def test_clip_of_zero_or_less_is_off(clip):
    f, iv, _ = inputs()
    assert torch.equal(hgrn2_scan(f, iv, clip), hgrn2_scan(f, iv))


# --- States, packed sequences, steps --------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_prefix_hands_its_state_to_the_rest(backend, clip, reverse):
    f, iv, state = inputs(length=100)
    options = {"reverse": reverse, "return_final_state": True, "backend": backend}
    whole, last = hgrn2_scan(f, iv, clip, initial_state=state, **options)
    parts = [slice(0, 37), slice(37, 100)]
    outputs = {}
    for part in reversed(parts) if reverse else parts:
        outputs[part.start], state = hgrn2_scan(
            f[:, part], iv[:, part], clip, initial_state=state, **options
        )
    assert measure(torch.cat([outputs[0], outputs[37]], 1), whole)[0] < 1e-6
    assert measure(state, last)[0] < 1e-6


@ON_BOTH
def test_steps_continue_a_prefill(backend):
    f, iv, _ = inputs(length=70, dtype=torch.float16)
    whole, last = hgrn2_scan(f, iv, 0.7, return_final_state=True, backend=backend)
    _, state = hgrn2_scan(f[:, :60], iv[:, :60], 0.7, return_final_state=True, backend=backend)
    for t in range(60, 70):
        before = state.clone()
        h, new_state = hgrn2_step(f[:, t], iv[:, t], state, 0.7, backend=backend)
        assert torch.equal(state, before), "a step must not change the state it is given"
        assert h.dtype == torch.float16 and new_state.dtype == torch.float32
        assert measure(h, whole[:, t])[0] < 1e-6
        state = new_state
    assert measure(state, last)[0] < 1e-6


@ON_BOTH
def test_step_without_a_state_and_its_gradients(backend):
    f, iv, state = (x.requires_grad_() for x in inputs(length=1))
    h, _ = hgrn2_step(f[:, 0], iv[:, 0], None, backend=backend)
    assert torch.equal(h, iv[:, 0])
    h, new_state = hgrn2_step(f[:, 0], iv[:, 0], state, backend=backend)
    gradients = torch.autograd.grad((h + new_state).sum(), (f, iv, state))
    expected = (2 * state[:, None], torch.full_like(iv, 2.0), 2 * f[:, 0])
    for gradient, value in zip(gradients, expected):
        torch.testing.assert_close(gradient, value)


@ON_BOTH
@pytest.mark.parametrize("reverse", [False, True])
def test_each_packed_sequence_equals_itself_alone(backend, reverse):
    lengths = [0, 15, 0, 1, 64, 0, 48, 0]
    f, iv, state = inputs(1, sum(lengths), 5, states=len(lengths))
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    options = {"reverse": reverse, "return_final_state": True, "backend": backend}
    h, last = hgrn2_scan(f, iv, initial_state=state, cu_seqlens=boundaries, **options)
    for i, (f_i, iv_i) in enumerate(zip(f.split(lengths, 1), iv.split(lengths, 1))):
        alone, last_alone = hgrn2_scan(f_i, iv_i, initial_state=state[i : i + 1], **options)
        span = slice(int(boundaries[i]), int(boundaries[i + 1]))
        assert measure(h[:, span], alone)[0] < 1e-6
        assert measure(last[i : i + 1], last_alone)[0] < 1e-6


@ON_BOTH
def test_rows_past_the_last_boundary_are_zero(backend):
    f, iv, _ = inputs(1, 128, 4)
    f.requires_grad_(), iv.requires_grad_()
    boundaries = torch.tensor([0, 100], dtype=torch.int32, device=DEVICE)
    with poisoned_memory():
        h = hgrn2_scan(f, iv, cu_seqlens=boundaries, backend=backend)
        gradients = torch.autograd.grad(h.sum(), (f, iv))
    for tensor in (h, *gradients):
        assert torch.equal(tensor[:, 100:], torch.zeros_like(tensor[:, 100:]))
        assert bool(tensor[:, 1:100].any())


@ON_BOTH
def test_padding_is_left_out_by_giving_lengths(backend):
    f, iv, _ = inputs(1, 8, 4)
    boundaries = torch.tensor([0, 3], device=DEVICE)
    options = {"return_final_state": True, "backend": backend}
    _, state = hgrn2_scan(f, iv, cu_seqlens=boundaries, **options)
    _, alone = hgrn2_scan(f[:, :3], iv[:, :3], **options)
    assert torch.equal(state, alone)


@pytest.mark.skipif(INTERPRETING, reason="2050 documents take minutes in the interpreter")
def test_many_short_documents():
    f, iv, _ = inputs(1, 2050 * 16, 3)
    boundaries = torch.arange(0, 2051 * 16, 16, device=DEVICE)
    h = hgrn2_scan(f, iv, cu_seqlens=boundaries)
    alone = hgrn2_scan(f.view(2050, 16, 3), iv.view(2050, 16, 3))
    assert measure(h.view(2050, 16, 3), alone)[0] < 1e-6


@ON_BOTH
def test_gradient_of_the_final_state_alone(backend):
    f, iv, state = (x.requires_grad_() for x in inputs(length=9))
    _, last = hgrn2_scan(f, iv, initial_state=state, return_final_state=True, backend=backend)
    gradients = torch.autograd.grad(last.sum(), (f, iv, state))
    _, last = hgrn2_scan(f, iv, initial_state=state, return_final_state=True, backend="reference")
    for gradient, expected in zip(gradients, torch.autograd.grad(last.sum(), (f, iv, state))):
        torch.testing.assert_close(gradient, expected)


@ON_BOTH
def test_empty_sequences_batches_and_channels(backend):
    for shape in ((2, 0, 3), (0, 5, 3), (2, 5, 0)):
        f = torch.rand(shape, device=DEVICE, requires_grad=True)
        state = torch.randn(shape[0], shape[2], device=DEVICE, requires_grad=True)
        h, last = hgrn2_scan(f, f, initial_state=state, return_final_state=True, backend=backend)
        assert h.shape == shape and last.shape == state.shape
        if shape[1] == 0:
            assert torch.equal(last, state)
            (gradient,) = torch.autograd.grad((3 * last).sum(), state)
            assert torch.equal(gradient, torch.full_like(state, 3.0))


# --- Strides, dtypes, determinism -----------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("gradient", ["stride 0", "transposed", "sliced"])
def test_strides_of_inputs_and_gradients(backend, gradient):
    f, iv, _ = inputs(2, 40, 6)
    layouts = {
        "contiguous": (f, iv),
        "channels first": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (f, iv)),
        "length first": tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (f, iv)),
        "expanded": (f[:1].expand(2, -1, -1), iv[:1].expand(2, -1, -1)),
        "fused": tuple(torch.cat((f, iv), 2).split(6, 2)),
        "every other": (f.repeat(1, 1, 2)[..., ::2], iv.repeat(1, 1, 2)[..., ::2]),
    }
    grads = {
        "stride 0": torch.ones((), device=DEVICE).expand(2, 40, 6),
        "transposed": torch.randn(6, 40, 2, device=DEVICE).permute(2, 1, 0),
        "sliced": torch.randn(2, 80, 12, device=DEVICE)[:, ::2, 3:9],
    }
    for name, (a, b) in layouts.items():
        results = []
        for dtype, on in ((torch.float32, backend), (torch.float64, "reference")):
            leaves = [x.detach().to(dtype).requires_grad_() for x in (a, b)]
            h = hgrn2_scan(*leaves, backend=on)
            results.append((h, *torch.autograd.grad(h, leaves, grads[gradient].to(dtype))))
        assert results[0][0].is_contiguous()
        for actual, expected in zip(*results):
            assert measure(actual.detach(), expected.detach())[0] < 2e-5, name


@ON_BOTH
def test_mixed_dtypes_and_their_gradients(backend):
    f, iv, state = inputs(dtype=torch.float16)
    f = f.float().requires_grad_()
    iv.requires_grad_()
    state = state.bfloat16().requires_grad_()
    h, last = hgrn2_scan(f, iv, initial_state=state, return_final_state=True, backend=backend)
    assert h.dtype == torch.float16 and last.dtype == torch.float32
    gradients = torch.autograd.grad(h.float().sum() + last.sum(), (f, iv, state))
    assert [g.dtype for g in gradients] == [torch.float32, torch.float16, torch.bfloat16]


def test_float64_is_computed_in_float64():
    f, iv, _ = inputs(dtype=torch.float64)
    h, state = hgrn2_scan(f, iv, return_final_state=True)
    assert h.dtype == state.dtype == torch.float64
    assert measure(h, hgrn2_scan(f, iv, backend="reference"))[0] < 1e-15


@ON_BOTH
def test_autocast(backend):
    f, iv, _ = inputs()
    expected = hgrn2_scan(f, iv, backend=backend)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(hgrn2_scan(f, iv, backend=backend), expected)
        projected = iv @ torch.eye(iv.shape[2], device=DEVICE)
        assert hgrn2_scan(f, projected, backend=backend).dtype == torch.bfloat16


@ON_BOTH
@pytest.mark.parametrize("clip", [None, 0.7])
def test_same_bits_every_time(backend, clip):
    length = 130 if INTERPRETING else 5000
    f, iv, state = inputs(1, length, 19)
    arguments = ((f, iv, clip), {"initial_state": state, "return_final_state": True})
    first = evaluate(hgrn2_scan, arguments, backend=backend)
    for _ in range(2 if INTERPRETING else 20):
        again = evaluate(hgrn2_scan, arguments, backend=backend)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device and 9 GiB of its memory")
def test_offsets_past_int32():
    memory = torch.empty(3, 2**20, 1536, dtype=torch.bfloat16, device=DEVICE)
    length = 1000
    f = memory[1:, -length:, :64]
    iv = memory[1:, -length:, 64:128]
    f.uniform_(0.5, 1), iv.normal_()
    arguments = ((f, iv), {})
    oracle = evaluate(hgrn2_scan, arguments, dtype=torch.float64, backend="reference")
    results = evaluate(hgrn2_scan, arguments, backend="triton")
    assert_matches(results, oracle, torch.bfloat16)


@pytest.mark.skipif(INTERPRETING, reason="large grids take minutes in the interpreter")
@pytest.mark.parametrize("shape", [(65600, 16, 1), (1, 16, 80000)], ids=str)
def test_large_grids(shape):
    f, iv, _ = inputs(*shape)
    h = hgrn2_scan(f, iv)
    assert measure(h, hgrn2_scan(f, iv, backend="reference"))[0] < 1e-6


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(0, 300),
    channels=st.integers(1, 40),
    clip=st.sampled_from([None, 0.5, 2.0]),
    reverse=st.booleans(),
    cuts=st.none() | st.lists(st.integers(0, 300), max_size=6),
    seed=st.integers(0, 2**31),
)
def test_torch_equals_the_reference_on_any_input(length, channels, clip, reverse, cuts, seed):
    f, iv, _ = inputs(1, length, channels, torch.float64, seed)
    boundaries = None
    if cuts is not None:
        cuts = sorted(min(cut, length) for cut in cuts)
        boundaries = torch.tensor([0, *cuts], device=DEVICE)
    arguments = (
        (f, iv, clip),
        {"reverse": reverse, "cu_seqlens": boundaries, "return_final_state": True},
    )
    expected = evaluate(hgrn2_scan, arguments, backend="reference")
    assert_matches(evaluate(hgrn2_scan, arguments, backend="torch"), expected, torch.float64)


# --- Derivatives ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reverse": True},
        {"res_clip": 0.8},
        {"res_clip": 0.8, "reverse": True, "log_decay": True},
        {"cu_seqlens": [0, 3, 3, 10, 11]},
        {"cu_seqlens": [0, 3, 3, 10, 11], "reverse": True, "res_clip": 0.8},
    ],
    ids=str,
)
def test_first_and_second_derivatives(backend, options):
    options = dict(options)
    boundaries = options.pop("cu_seqlens", None)
    if boundaries is not None:
        options["cu_seqlens"] = torch.tensor(boundaries, device=DEVICE)
    f, iv, state = inputs(1, 12, 2, torch.float64, states=4 if boundaries else 1)
    if options.get("log_decay"):
        f = f.log()
    leaves = [x.double().requires_grad_() for x in (f, iv, state)]

    def run(f, iv, state):
        return hgrn2_scan(
            f, iv, initial_state=state, return_final_state=True, backend=backend, **options
        )

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_second_derivative_of_a_fused_kernel_raises(backend):
    f, iv, _ = inputs(1, 8, 2)
    f.requires_grad_()

    def loss(f):
        return hgrn2_scan(f, iv, backend=backend).square().sum()

    (gradient,) = torch.autograd.grad(loss(f), f, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"hgrn2_scan.*backend='torch'"):
        torch.autograd.grad(gradient.sum(), f)
    with pytest.raises(NotImplementedError, match="hgrn2_scan"):
        torch.func.grad(lambda f: torch.func.grad(loss)(f).sum())(f.detach())


@ON_BOTH
def test_functional_transforms(backend):
    f, iv, _ = inputs(3, 9, 2)

    def loss(f, iv):
        return hgrn2_scan(f[None], iv[None], backend=backend).square().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(f, iv)
    leaves = f.clone().requires_grad_(), iv.clone().requires_grad_()
    total = hgrn2_scan(*leaves, backend=backend).square().sum()
    for actual, expected in zip(each, torch.autograd.grad(total, leaves)):
        torch.testing.assert_close(actual, expected)


@ON_BOTH
def test_only_the_gradients_asked_for(backend):
    f, iv, state = inputs()
    iv.requires_grad_()
    h = hgrn2_scan(f, iv, initial_state=state, backend=backend)
    h.sum().backward()
    assert iv.grad is not None and f.grad is None and state.grad is None
    assert not hgrn2_scan(f, iv.detach(), backend=backend).requires_grad
    with torch.no_grad():
        assert not hgrn2_scan(f, iv, backend=backend).requires_grad


# --- Registration and compilation -----------------------------------------------------------


@ON_BOTH
def test_opcheck(backend):
    checked = set()
    for sample in samples(OPERATOR, backend):
        if sample.label in ("one token", "clipped", "packed"):
            arguments = make_sample(sample, DEVICE, torch.float32)
            checked |= set(opcheck_calls(partial(evaluate, hgrn2_scan, arguments, backend=backend)))
    prefix = "neuralops_ssm::hgrn2_"
    expected = {
        "torch": {"scan_torch", "scan_torch_bwd"},
        "triton": {"scan_fwd", "scan_bwd", "segment_ids"},
    }
    assert checked == {prefix + name for name in expected[backend]}


@ON_BOTH
def test_compiles_to_one_graph_for_every_length(backend):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(f, iv, state):
        h, last = hgrn2_scan(
            f, iv, 0.9, initial_state=state, return_final_state=True, backend=backend
        )
        return h * 2, last

    compiled = torch.compile(step, backend=count, fullgraph=True)
    for length in (64, 65, 100, 7, 128):
        leaves = [x.requires_grad_() for x in inputs(length=length)]
        h, last = compiled(*leaves)
        gradients = torch.autograd.grad(h.sum() + last.sum(), leaves)
        expected_h, expected_last = step(*leaves)
        expected = torch.autograd.grad(expected_h.sum() + expected_last.sum(), leaves)
        for actual, value in zip((h, last, *gradients), (expected_h, expected_last, *expected)):
            torch.testing.assert_close(actual, value)
    assert len(graphs) <= 2


@ON_BOTH
def test_compiles_with_autograd_and_packed_sequences(backend):
    boundaries = torch.tensor([0, 10, 40], device=DEVICE)

    def loss(f, iv):
        return hgrn2_scan(f, iv, cu_seqlens=boundaries, backend=backend).sum()

    f, iv, _ = (x.requires_grad_() for x in inputs(1, 40))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(f, iv), (f, iv))
    for gradient, expected in zip(actual, torch.autograd.grad(loss(f, iv), (f, iv))):
        torch.testing.assert_close(gradient, expected)


def test_exports():
    class Mixer(torch.nn.Module):
        def forward(self, f, iv):
            return hgrn2_scan(f.sigmoid(), iv)

    f, iv, _ = inputs()
    dims = {1: torch.export.Dim("length", min=2, max=4096)}
    program = torch.export.export(Mixer(), (f, iv), dynamic_shapes=(dims, dims))
    f, iv, _ = inputs(length=33)
    torch.testing.assert_close(program.module()(f, iv), Mixer()(f, iv))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a CUDA device")
def test_cuda_graph_of_a_step():
    f, iv, state = inputs(length=1)
    f, iv = f[:, 0], iv[:, 0]
    hgrn2_step(f, iv, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, new_state = hgrn2_step(f, iv, state)
    f.uniform_(), iv.normal_()
    graph.replay()
    expected_h, expected_state = hgrn2_step(f, iv, state)
    assert torch.equal(h, expected_h) and torch.equal(new_state, expected_state)


@pytest.mark.skipif(DEVICE == "cpu", reason="compilations are counted on a CUDA device")
def test_a_new_batch_or_length_compiles_nothing():
    from neuralops.ssm.hgrn2 import backward_kernels, forward_kernels

    def run(batch, length):
        f, iv, _ = (x.requires_grad_() for x in inputs(batch, length, 64))
        hgrn2_scan(f, iv).sum().backward()

    def compiled():
        return sum(
            len(kernel.device_caches[torch.cuda.current_device()][0])
            for kernel in (forward_kernels.forward_kernel, backward_kernels.backward_kernel)
        )

    run(2, 100), run(300, 100)
    before = compiled()
    for batch, length in ((1, 1), (3, 17), (5, 128), (7, 4096), (301, 33)):
        run(batch, length)
    assert compiled() == before


@pytest.mark.skipif(DEVICE == "cpu", reason="synchronisations are a CUDA device's")
def test_packed_sequences_do_not_wait_for_the_device():
    f, iv, _ = inputs(1, 100)
    boundaries = torch.tensor([0, 10, 90], device=DEVICE)
    hgrn2_scan(f, iv, cu_seqlens=boundaries)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for backend in ("triton", "torch"):
            hgrn2_scan(f, iv, cu_seqlens=boundaries, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- What can go wrong ----------------------------------------------------------------------


def good():
    f, iv, state = inputs(2, 6, 3)
    return {"f": f, "iv": iv, "initial_state": state}


def packed(*boundaries, dtype=torch.int32, batch=1):
    f, iv, _ = inputs(batch, 6, 3)
    return {"f": f, "iv": iv, "cu_seqlens": torch.tensor(boundaries, dtype=dtype, device=DEVICE)}


WRONG = {
    "f is a list": ({**good(), "f": [1.0]}, TypeError, r"f must be a tensor \(B, L, D\), got list"),
    "sparse f": (
        {**good(), "f": torch.ones(2, 6, 3, device=DEVICE).to_sparse()},
        TypeError,
        r"f must be a dense tensor \(B, L, D\)",
    ),
    "integer f": (
        {**good(), "f": torch.ones(2, 6, 3).int()},
        TypeError,
        r"f must be float16.*int32",
    ),
    "boolean iv": ({**good(), "iv": torch.ones(2, 6, 3).bool()}, TypeError, "iv must be float16"),
    "complex iv": ({**good(), "iv": torch.ones(2, 6, 3).cfloat()}, TypeError, "iv must be float"),
    "f of rank 2": (
        {**good(), "f": torch.ones(6, 3)},
        ValueError,
        r"f must have shape \(B, L, D\)",
    ),
    "shapes differ": (
        {**good(), "iv": torch.ones(2, 7, 3, device=DEVICE)},
        ValueError,
        r"iv must have shape \(B, L, D\) like f = \(2, 6, 3\), got \(2, 7, 3\)",
    ),
    "another device": (
        {**good(), "iv": torch.ones(2, 6, 3, device="meta")},
        ValueError,
        r"iv must be on .* like f, got meta; move it",
    ),
    "state's shape": (
        {**good(), "initial_state": torch.ones(3, 3, device=DEVICE)},
        ValueError,
        r"initial_state must have shape \(B, D\) = \(2, 3\), got \(3, 3\)",
    ),
    "state's rank": (
        {**good(), "initial_state": torch.ones(3, device=DEVICE)},
        ValueError,
        "initial_state must have shape",
    ),
    "integer state": (
        {**good(), "initial_state": torch.ones(2, 3, device=DEVICE).long()},
        TypeError,
        "initial_state must be float16",
    ),
    "packed state's shape": (
        {**packed(0, 3, 6), "initial_state": torch.ones(1, 3, device=DEVICE)},
        ValueError,
        r"initial_state must have shape \(n, D\).*= \(2, 3\), got \(1, 3\)",
    ),
    "clip is a string": (
        {**good(), "res_clip": "1"},
        TypeError,
        "res_clip must be a Python number",
    ),
    "clip is True": ({**good(), "res_clip": True}, TypeError, "res_clip must be a Python number"),
    "clip is nan": ({**good(), "res_clip": math.nan}, ValueError, "res_clip.*nan"),
    "flag is an int": ({**good(), "reverse": 1}, TypeError, "reverse must be True or False"),
    "log_decay is None": ({**good(), "log_decay": None}, TypeError, "log_decay must be True or"),
    "return_final_state": (
        {**good(), "return_final_state": "yes"},
        TypeError,
        "return_final_state",
    ),
    "cu_seqlens is a list": (
        {**packed(0), "cu_seqlens": [0, 6]},
        TypeError,
        "cu_seqlens must be an",
    ),
    "float cu_seqlens": (
        packed(0, 6, dtype=torch.float32),
        TypeError,
        "cu_seqlens must be an int32",
    ),
    "cu_seqlens's rank": (
        {**packed(0), "cu_seqlens": torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)},
        ValueError,
        r"cu_seqlens must have shape \(n \+ 1,\)",
    ),
    "cu_seqlens is empty": (packed(), ValueError, "cu_seqlens must have shape"),
    "cu_seqlens and B 2": (packed(0, 6, batch=2), ValueError, "batch size must be 1, got 2"),
    "unknown backend": (
        {**good(), "backend": "cuda"},
        ValueError,
        "backend must be one of triton, torch, reference, got 'cuda'",
    ),
    "unknown keyword": ({**good(), "revers": True}, TypeError, "revers"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("backend", [None, "triton", "torch", "reference"])
def test_wrong_arguments(case, backend):
    arguments, error, message = case
    with pytest.raises(error, match=message):
        hgrn2_scan(**{"backend": backend, **arguments})


BOUNDARIES = {
    "start at 1": ((1, 6), "must start at 0, got 1"),
    "decrease": ((0, 4, 3, 6), "must not decrease, got 4 then 3"),
    "past the end": ((0, 7), "must end at the length 6 or before, got 7"),
}


@pytest.mark.parametrize("case", BOUNDARIES.values(), ids=BOUNDARIES.keys())
@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_wrong_boundaries(case, backend, monkeypatch):
    monkeypatch.setenv("NEURALOPS_VALIDATE", "1")
    values, message = case
    with pytest.raises(ValueError, match=message):
        hgrn2_scan(**packed(*values), backend=backend)


STEPS = {
    "f of rank 3": (
        {"f": torch.ones(2, 1, 3)},
        ValueError,
        r"hgrn2_step: f must have shape \(B, D\)",
    ),
    "another device": (
        {"state": torch.ones(2, 3, device="meta")},
        ValueError,
        "hgrn2_step: state must be on cpu like f, got meta",
    ),
    "iv's shape": (
        {"iv": torch.ones(2, 4)},
        ValueError,
        r"iv must have shape .*\(2, 3\), got \(2, 4\)",
    ),
    "state's shape": ({"state": torch.ones(1, 3)}, ValueError, "state must have shape"),
    "state is an int": ({"state": 0}, TypeError, "state must be a tensor"),
    "integer iv": ({"iv": torch.ones(2, 3).long()}, TypeError, "iv must be float16"),
}


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS.keys())
def test_wrong_arguments_of_a_step(case):
    changed, error, message = case
    arguments = {"f": torch.ones(2, 3), "iv": torch.ones(2, 3), "state": torch.ones(2, 3)}
    with pytest.raises(error, match=message):
        hgrn2_step(**{**arguments, **changed})


# --- Memory, threads, modules ---------------------------------------------------------------


def test_torch_backward_keeps_memory_linear():
    f, iv, _ = inputs(1, 4096, 64)
    f.requires_grad_(), iv.requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hgrn2_scan(f, iv, backend="torch")
    assert sum(saved) <= 3 * f.untyped_storage().nbytes()


@ON_BOTH
def test_threads(backend):
    f, iv, _ = inputs(length=33)
    expected = hgrn2_scan(f, iv, backend=backend)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(hgrn2_scan(f, iv, backend=backend)))
        for _ in range(1 if INTERPRETING else 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result in results) and results


def test_checkpointing_and_copies_of_a_module():
    class Mixer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(4, 4, device=DEVICE)

        def forward(self, x):
            f = self.gate(x).sigmoid()
            return hgrn2_scan(f, (1 - f) * x)

    mixer, x = Mixer(), torch.randn(2, 20, 4, device=DEVICE)
    plain = mixer(x).sum()
    plain.backward()
    copied = copy.deepcopy(mixer)
    copied.zero_grad()
    torch.utils.checkpoint.checkpoint(copied, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(copied.gate.weight.grad, mixer.gate.weight.grad)


def test_explained_and_registered():
    assert neuralops.core.get_operator("hgrn2_scan") is OPERATOR
    f, iv, _ = inputs()
    explanation = neuralops.core.explain(hgrn2_scan, f.double(), iv)
    assert explanation.backend == "torch"
    assert any("float64" in reason for reason in explanation.reasons["triton"])


def test_import_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from neuralops.ssm import hgrn2_scan\n"
        "f = torch.rand(1, 5, 2, requires_grad=True)\n"
        "hgrn2_scan(f, f).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
