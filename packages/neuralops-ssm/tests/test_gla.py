"""gla_scan and gla_step: against the oracle, and what users do with them."""

import itertools
import math
import subprocess
import sys
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
from neuralops.ssm import gla_scan, gla_step, hgrn2_scan
from neuralops.ssm.gla import decays, launchers
from neuralops.ssm.gla.op import OPERATOR

ON_BOTH = pytest.mark.parametrize("backend", BACKENDS)
GATES = pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])


@pytest.fixture
def split(monkeypatch):
    """A device so wide that even short sequences are split into parts of one chunk or two."""
    monkeypatch.setattr(launchers, "LEAST_PART", 1)
    monkeypatch.setattr(launchers, "multiprocessors", lambda device: 512)


def inputs(
    batch=1, length=65, heads=2, key_width=5, value_width=3, dtype=torch.float32, seed=0,
    states=None, scalar=False,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tokens = (batch, heads, length)
    q, k, v = normal(*tokens, key_width), normal(*tokens, key_width), normal(*tokens, value_width)
    gate = torch.rand(tokens if scalar else (*tokens, key_width), generator=generator) ** 0.3
    state = normal(states or batch, heads, key_width, value_width)
    q, k, v, gate = (x.to(DEVICE, dtype) for x in (q, k, v, gate))
    return q, k, v, gate, state.to(DEVICE)


def assert_matches(results, oracle, dtype=torch.float32):
    for name, result in results.items():
        tolerance = TOLERANCES[dtype]
        bound = tolerance.gradient if name.startswith("grad") else tolerance.output
        ratio, _ = measure(result, oracle[name])
        assert ratio <= bound, f"{name}: {ratio:.2e} above {bound:.2e}"


def against_reference(tensors, options, backend, dtype=torch.float32):
    arguments = (tensors, options)
    oracle = evaluate(gla_scan, arguments, dtype=torch.float64, backend="reference")
    with poisoned_memory():
        results = evaluate(gla_scan, arguments, backend=backend)
    assert_matches(results, oracle, dtype)


# --- Against the oracle ---------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "dtype", "sample"), sample_matrix(OPERATOR))
def test_matches_oracle(backend, dtype, sample):
    with poisoned_memory():
        errors = check_sample(OPERATOR, sample, backend=backend, device=DEVICE, dtype=dtype)
    assert [str(error) for error in errors if not error.passed] == []


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize(
    "options",
    [(False, False, False), (True, False, True), (False, True, False), (True, True, True)],
    ids=str,
)
def test_split_along_the_sequence(backend, options):
    reverse, packed, normalize = options
    boundaries = torch.tensor([0, 0, 15, 15, 16, 150, 180], device=DEVICE) if packed else None
    q, k, v, gate, state = inputs(1, 190, 1, states=6 if packed else 1)
    if normalize:
        q, k = q.abs() + 0.1, k.abs() + 0.1
        state = (state, state[..., 0].abs())
    _, splits = launchers._split(1, 3, q.device)
    assert splits == 3
    options = {
        "reverse": reverse, "normalize": normalize, "cu_seqlens": boundaries,
        "initial_state": state, "return_final_state": True,
    }  # fmt: skip
    against_reference((q, k, v, gate), options, backend)


@GATES
def test_reference_is_the_closed_form(scalar):
    q, k, v, gate, _ = inputs(length=12, dtype=torch.float64, scalar=scalar)
    wide = gate.unsqueeze(-1).expand_as(q) if scalar else gate
    expected = torch.zeros_like(v)
    for t, s in itertools.product(range(12), range(12)):
        if s <= t:
            weight = (q[:, :, t] * wide[:, :, s + 1 : t + 1].prod(2) * k[:, :, s]).sum(-1)
            expected[:, :, t] += weight.unsqueeze(-1) * v[:, :, s] * 0.5
    torch.testing.assert_close(gla_scan(q, k, v, gate, scale=0.5, backend="reference"), expected)


def test_each_state_entry_is_an_hgrn2_scan():
    q, k, v, gate, _ = inputs(1, 20, 1, 4, 3, torch.float64)
    gates = gate[0, 0].unsqueeze(-1).expand(20, 4, 3).reshape(1, 20, 12)
    entries = (k[0, 0].unsqueeze(-1) * v[0, 0].unsqueeze(-2)).reshape(1, 20, 12)
    states = hgrn2_scan(gates, entries).view(20, 4, 3)
    expected = torch.einsum("tk,tkv->tv", q[0, 0], states)
    torch.testing.assert_close(gla_scan(q, k, v, gate)[0, 0], expected)


@ON_BOTH
@GATES
def test_ones_give_a_plain_sum_and_zeros_restart(backend, scalar):
    q, k, v, gate, _ = inputs(1, 100, 1, 4, 4, scalar=scalar)
    ones = torch.ones_like(gate)
    weights = torch.tril(q.double() @ k.double().transpose(-1, -2))
    assert measure(gla_scan(q, k, v, ones, backend=backend), weights @ v.double())[0] < 2e-6
    restarts = ones.clone()
    restarts[:, :, [0, 30, 31, 64]] = 0.0
    out = gla_scan(q, k, v, restarts, backend=backend)
    piece = torch.tensor([0] * 30 + [1] + [2] * 33 + [3] * 36, device=DEVICE)
    same = piece.unsqueeze(1) == piece
    assert measure(out, weights.masked_fill(~same, 0.0) @ v.double())[0] < 2e-6
    logs = gla_scan(q, k, v, restarts.log(), log_decay=True, backend=backend)
    assert measure(logs, out)[0] < 1e-6


@ON_BOTH
@GATES
def test_very_negative_log_gates_are_finite(backend, scalar):
    q, k, v, gate, _ = inputs(1, 65, 1, 8, 8, scalar=scalar)
    gate = torch.full_like(gate, -1e4).requires_grad_()
    with poisoned_memory():
        out = gla_scan(q, k, v, gate, log_decay=True, backend=backend)
        (gradient,) = torch.autograd.grad(out.sum(), gate)
    assert measure(out, (q * k).double().sum(-1, keepdim=True) * v.double())[0] < 1e-6
    assert torch.equal(gradient, torch.zeros_like(gradient))


@ON_BOTH
@GATES
def test_gradient_of_a_zero_gate_is_the_recurrences_own(backend, scalar):
    ones = torch.ones(1, 1, 2, 1, device=DEVICE)
    gate = torch.zeros((1, 1, 2) if scalar else (1, 1, 2, 1), device=DEVICE, requires_grad=True)
    v = torch.tensor([3.0, 5.0], device=DEVICE).view(1, 1, 2, 1)
    (gradient,) = torch.autograd.grad(gla_scan(ones, ones, v, gate, backend=backend).sum(), gate)
    assert gradient.flatten().tolist() == [0.0, 3.0]


@ON_BOTH
def test_gradients_of_many_zero_gates(backend):
    q, k, v, gate, state = inputs(1, 70, 1, 4, 4)
    gate = gate.masked_fill(torch.rand(gate.shape, device=DEVICE) < 0.3, 0.0)
    against_reference((q, k, v, gate), {"initial_state": state}, backend)


@ON_BOTH
def test_each_channel_has_its_own_kind_of_gates(backend):
    q, k, v, gate, state = inputs(1, 100, 1, 5, 3)
    gate[..., 0], gate[..., 1] = 1.0, 0.0
    gate[..., 2] = 0.999
    gate[..., 3] = 1e-3
    against_reference((q, k, v, gate), {"initial_state": state}, backend)
    against_reference((q, k, v, gate.log()), {"log_decay": True}, backend)


@ON_BOTH
@GATES
def test_the_denominator_is_clamped(backend, scalar):
    q, k, v, gate, _ = inputs(1, 40, 1, 4, 4, scalar=scalar)
    q, k = q.abs(), k.abs()
    q[:, :, 10:20] = 0.0
    q[:, :, 20:30] *= 1e-3
    options = {"normalize": True, "eps": 0.05}
    against_reference((q, k, v, gate), options, backend)
    out = gla_scan(q, k, v, gate, **options, backend=backend)
    assert not out[:, :, 10:20].any() and bool(out[:, :, 20:].any())


def test_small_blocks_equal_large_ones(monkeypatch):
    q, k, v, gate, _ = inputs(1, 130, 1, dtype=torch.float64)
    gate = 0.9 + 0.1 * gate
    results = []
    for bases in ((64, 16), (16,), ()):
        monkeypatch.setattr(decays, "BASES", bases)
        results.append(evaluate(gla_scan, ((q, k, v, gate), {}), backend="torch"))
    for name, value in results[0].items():
        assert measure(results[1][name], value)[0] < 1e-13
        assert measure(results[2][name], value)[0] < 1e-13


# --- States, packed sequences, steps --------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_prefix_hands_its_state_to_the_rest(backend, normalize, reverse):
    q, k, v, gate, state = inputs(length=100)
    if normalize:
        q, k = q.abs(), k.abs()
        state = (state, state[..., 0].abs())
    options = {
        "reverse": reverse, "normalize": normalize, "return_final_state": True,
        "backend": backend,
    }  # fmt: skip
    whole, last = gla_scan(q, k, v, gate, initial_state=state, **options)
    outputs = {}
    parts = [slice(0, 37), slice(37, 100)]
    for part in reversed(parts) if reverse else parts:
        outputs[part.start], state = gla_scan(
            *(x[:, :, part] for x in (q, k, v, gate)), initial_state=state, **options
        )
    assert measure(torch.cat([outputs[0], outputs[37]], 2), whole)[0] < 2e-6
    for actual, expected in zip(*((s if normalize else (s,)) for s in (state, last))):
        assert measure(actual, expected)[0] < 2e-6


@ON_BOTH
@GATES
@pytest.mark.parametrize("normalize", [False, True])
def test_steps_continue_a_prefill(backend, scalar, normalize):
    steps = 8 if INTERPRETING else 64
    q, k, v, gate, _ = inputs(length=60 + steps, dtype=torch.float16, scalar=scalar)
    q, k = q.abs(), k.abs()
    options = {"normalize": normalize, "scale": 0.5, "backend": backend}
    whole, last = gla_scan(q, k, v, gate, return_final_state=True, **options)
    _, state = gla_scan(
        *(x[:, :, :60] for x in (q, k, v, gate)), return_final_state=True, **options
    )
    for t in range(60, 60 + steps):
        kept = [x.clone() for x in (state if normalize else (state,))]
        out, new_state = gla_step(*(x[:, :, t] for x in (q, k, v, gate)), state, **options)
        for now, before in zip(state if normalize else (state,), kept):
            assert torch.equal(now, before), "a step must not change the state it is given"
        assert out.dtype == torch.float16
        assert measure(out, whole[:, :, t])[0] < 1.5e-3
        state = new_state
    for actual, expected in zip(*((s if normalize else (s,)) for s in (state, last))):
        assert actual.dtype == torch.float32
        assert measure(actual, expected)[0] < 1e-3


@ON_BOTH
def test_step_without_a_state_and_its_gradients(backend):
    q, k, v, gate, state = (x.requires_grad_() for x in inputs(length=1, key_width=4))
    tokens = (q[:, :, 0], k[:, :, 0], v[:, :, 0], gate[:, :, 0])
    out, _ = gla_step(*tokens, None, backend=backend)
    torch.testing.assert_close(out, (q * k).sum(-1) * v[:, :, 0])
    results = []
    for on in (backend, "reference"):
        out, new_state = gla_step(*tokens, state, backend=on)
        loss = out.sum() + new_state.square().sum()
        results.append(torch.autograd.grad(loss, (q, k, v, gate, state)))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@ON_BOTH
@pytest.mark.parametrize("reverse", [False, True])
def test_each_packed_sequence_equals_itself_alone(backend, reverse):
    lengths = [0, 15, 0, 1, 64, 0, 48, 65, 0]
    if INTERPRETING:
        lengths = [0, 15, 0, 1, 65, 0]
    q, k, v, gate, state = inputs(1, sum(lengths), 1, states=len(lengths))
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    options = {"reverse": reverse, "return_final_state": True, "backend": backend}
    out, last = gla_scan(q, k, v, gate, initial_state=state, cu_seqlens=boundaries, **options)
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v, gate)))
    for i, part in enumerate(parts):
        alone, last_alone = gla_scan(*part, initial_state=state[i : i + 1], **options)
        span = slice(int(boundaries[i]), int(boundaries[i + 1]))
        assert measure(out[:, :, span], alone)[0] < 2e-6
        assert measure(last[i : i + 1], last_alone)[0] < 2e-6


@ON_BOTH
@GATES
def test_rows_past_the_last_boundary_are_zero(backend, scalar):
    leaves = [x.requires_grad_() for x in inputs(1, 128, 1, 4, scalar=scalar)[:4]]
    boundaries = torch.tensor([0, 100], dtype=torch.int32, device=DEVICE)
    with poisoned_memory():
        out = gla_scan(*leaves, cu_seqlens=boundaries, backend=backend)
        gradients = torch.autograd.grad(out.sum(), leaves)
    for tensor in (out, *gradients):
        assert torch.equal(tensor[:, :, 100:], torch.zeros_like(tensor[:, :, 100:]))
        assert bool(tensor[:, :, 1:100].any())


@ON_BOTH
def test_padding_is_left_out_by_giving_lengths(backend):
    q, k, v, gate, _ = inputs(1, 8, 1)
    boundaries = torch.tensor([0, 3], device=DEVICE)
    options = {"return_final_state": True, "backend": backend}
    _, state = gla_scan(q, k, v, gate, cu_seqlens=boundaries, **options)
    _, alone = gla_scan(*(x[:, :, :3] for x in (q, k, v, gate)), **options)
    assert measure(state, alone)[0] < 1e-6


@pytest.mark.skipif(INTERPRETING, reason="2050 documents take minutes in the interpreter")
def test_many_short_documents():
    q, k, v, gate, _ = inputs(1, 2050 * 16, 1, 3, 2)
    boundaries = torch.arange(0, 2051 * 16, 16, device=DEVICE)
    out = gla_scan(q, k, v, gate, cu_seqlens=boundaries)
    alone = gla_scan(*(x[0, 0].view(2050, 1, 16, -1) for x in (q, k, v, gate)))
    assert measure(out[0, 0].view(2050, 1, 16, -1), alone)[0] < 1e-6


@ON_BOTH
@pytest.mark.parametrize("normalize", [False, True])
def test_gradient_of_the_final_state_alone(backend, normalize):
    q, k, v, gate, state = (x.requires_grad_() for x in inputs(length=9))
    first = (state, state[..., 0]) if normalize else state
    results = []
    for on in (backend, "reference"):
        _, last = gla_scan(
            q, k, v, gate, normalize=normalize, initial_state=first, return_final_state=True,
            backend=on,
        )  # fmt: skip
        loss = sum(x.square().sum() for x in (last if normalize else (last,)))
        results.append(torch.autograd.grad(loss, (k, v, gate, state)))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@ON_BOTH
@GATES
def test_empty_sequences_batches_and_widths(backend, scalar):
    shapes = [(2, 3, 0, 4, 2), (0, 3, 5, 4, 2), (2, 0, 5, 4, 2)]
    if not scalar:
        shapes.append((2, 1, 5, 4, 0))
    for shape in shapes:
        batch, heads, length, key_width, value_width = shape
        tokens = (batch, heads, length)
        q, k = torch.rand(2, *tokens, key_width, device=DEVICE).unbind(0)
        v = torch.rand(*tokens, value_width, device=DEVICE)
        gate = torch.rand(tokens if scalar else (*tokens, key_width), device=DEVICE)
        state = torch.randn(batch, heads, key_width, value_width, device=DEVICE)
        leaves = [x.requires_grad_() for x in (q, k, v, gate, state)]
        out, last = gla_scan(
            *leaves[:4], initial_state=state, return_final_state=True, backend=backend
        )
        assert out.shape == v.shape and last.shape == state.shape
        if length == 0:
            assert torch.equal(last, state)
            (gradient,) = torch.autograd.grad((3 * last).sum(), state)
            assert torch.equal(gradient, torch.full_like(state, 3.0))


# --- Strides, dtypes, determinism -----------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("gradient", ["stride 0", "transposed", "sliced"])
def test_strides_of_inputs_and_gradients(backend, gradient):
    q, k, v, gate, _ = inputs(2, 40, 2, 6, 6)
    tensors = (q, k, v, gate)
    layouts = {
        "length before heads": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors],
        "channels first": [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors],
        "expanded": [x[:1, :1].expand(2, 2, -1, -1) for x in tensors],
        "fused": torch.cat(tensors, 3).split(6, 3),
    }
    grads = {
        "stride 0": torch.ones((), device=DEVICE).expand(2, 2, 40, 6),
        "transposed": torch.randn(6, 40, 2, 2, device=DEVICE).permute(3, 2, 1, 0),
        "sliced": torch.randn(2, 2, 80, 12, device=DEVICE)[:, :, ::2, 3:9],
    }
    for name, layout in layouts.items():
        results = []
        for dtype, on in ((torch.float32, backend), (torch.float64, "reference")):
            leaves = [x.detach().to(dtype).requires_grad_() for x in layout]
            out = gla_scan(*leaves, backend=on)
            results.append((out, *torch.autograd.grad(out, leaves, grads[gradient].to(dtype))))
        assert results[0][0].is_contiguous()
        for actual, expected in zip(*results):
            assert measure(actual.detach(), expected.detach())[0] < 2e-5, name


@ON_BOTH
def test_rows_far_apart(backend):
    """Where a chunk's rows span more than 2^31 elements they are copied first."""
    far = torch.empty_strided((1, 1, 3, 1), (0, 0, 2**26, 1), device="meta")
    assert launchers._near(far).stride(2) == 1
    near = torch.empty_strided((1, 1, 3, 1), (0, 0, 2**24, 1), device="meta")
    assert launchers._near(near) is near
    if DEVICE == "cuda":
        memory = torch.empty(2 * 2**26 + 1, dtype=torch.float16, device=DEVICE)
        q = memory.as_strided((1, 1, 3, 1), (0, 0, 2**26, 1)).copy_(torch.rand(1, 1, 3, 1))
        expected = gla_scan(q, q, q, q, backend="reference")
        assert measure(gla_scan(q, q, q, q, backend=backend), expected)[0] < 1.5e-3


@ON_BOTH
def test_mixed_dtypes_and_their_gradients(backend):
    q, k, v, gate, state = inputs(dtype=torch.float16)
    gate = gate.float()
    state = state.bfloat16()
    leaves = [x.requires_grad_() for x in (q, k, v, gate, state)]
    out, last = gla_scan(*leaves[:4], initial_state=state, return_final_state=True, backend=backend)
    assert out.dtype == torch.float16 and last.dtype == torch.float32
    gradients = torch.autograd.grad(out.float().sum() + last.sum(), leaves)
    assert [g.dtype for g in gradients] == [x.dtype for x in leaves]


def test_float64_is_computed_in_float64():
    q, k, v, gate, _ = inputs(dtype=torch.float64)
    out, state = gla_scan(q, k, v, gate, return_final_state=True)
    assert out.dtype == state.dtype == torch.float64
    assert measure(out, gla_scan(q, k, v, gate, backend="reference"))[0] < 1e-14


@ON_BOTH
def test_autocast(backend):
    q, k, v, gate, _ = inputs()
    expected = gla_scan(q, k, v, gate, backend=backend)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(gla_scan(q, k, v, gate, backend=backend), expected)
        projected = v @ torch.eye(v.shape[3], device=DEVICE)
        assert gla_scan(q, k, projected, gate, backend=backend).dtype == torch.bfloat16


@ON_BOTH
def test_same_bits_every_time(backend):
    q, k, v, gate, state = inputs(1, 130 if INTERPRETING else 5000, 1, 19, 19)
    arguments = ((q, k, v, gate), {"initial_state": state, "return_final_state": True})
    first = evaluate(gla_scan, arguments, backend=backend)
    for _ in range(1 if INTERPRETING else 10):
        again = evaluate(gla_scan, arguments, backend=backend)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device and 7 GiB of its memory")
def test_offsets_past_int32():
    memory = torch.empty(2**20, 3584, dtype=torch.bfloat16, device=DEVICE)
    rows = memory[-1000:].normal_()
    fused = rows[:, : 8 * 192].unflatten(1, (8, 192)).transpose(0, 1).unsqueeze(0)
    q, k, v = fused.split(64, 3)
    gate = torch.rand(1, 8, 1000, 64, device=DEVICE).pow(0.05)
    against_reference((q, k, v, gate), {"scale": 0.125}, "triton", torch.bfloat16)


@pytest.mark.skipif(INTERPRETING, reason="large grids take minutes in the interpreter")
def test_large_grids():
    q, k, v, gate, _ = inputs(656, 16, 100, 3, 2)
    out = gla_scan(q, k, v, gate)
    assert measure(out, gla_scan(q, k, v, gate, backend="reference"))[0] < 1e-6


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(0, 200),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    least=st.sampled_from([0.0, 0.5, 0.95]),
    zeros=st.sampled_from([0.0, 0.1]),
    options=st.fixed_dictionaries({"reverse": st.booleans(), "log_decay": st.booleans()}),
    cuts=st.none() | st.lists(st.integers(0, 200), max_size=5),
    seed=st.integers(0, 2**31),
)
def test_torch_equals_the_reference_on_any_input(length, widths, least, zeros, options, cuts, seed):
    q, k, v, gate, _ = inputs(1, length, 1, *widths, torch.float64, seed)
    gate = (least + (1 - least) * gate).masked_fill(gate < zeros, 0.0)
    if options["log_decay"]:
        gate = gate.log()
    boundaries = None
    if cuts is not None:
        boundaries = torch.tensor([0, *sorted(min(cut, length) for cut in cuts)], device=DEVICE)
    arguments = ((q, k, v, gate), {**options, "cu_seqlens": boundaries, "return_final_state": True})
    expected = evaluate(gla_scan, arguments, backend="reference")
    results = evaluate(gla_scan, arguments, backend="torch")
    for name, value in expected.items():
        # The first gate's gradient is 0 where nothing comes before it, and else a sum that cancels.
        torch.testing.assert_close(results[name], value, rtol=1e-11, atol=1e-11)


# --- Derivatives ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reverse": True, "log_decay": True},
        {"normalize": True, "scale": 0.7},
        {"cu_seqlens": [0, 3, 3, 10, 11]},
        {"cu_seqlens": [0, 3, 3, 10, 11], "reverse": True, "normalize": True},
        {"scalar": True, "normalize": True},
    ],
    ids=str,
)
def test_first_and_second_derivatives(backend, options):
    options = dict(options)
    scalar = options.pop("scalar", False)
    boundaries = options.pop("cu_seqlens", None)
    if boundaries is not None:
        options["cu_seqlens"] = torch.tensor(boundaries, device=DEVICE)
    tensors = inputs(1, 12, 1, 2, 2, torch.float64, states=4 if boundaries else 1, scalar=scalar)
    q, k, v, gate, state = (x.double() for x in tensors)
    if options.get("log_decay"):
        gate = gate.log()
    normalize = options.get("normalize")
    if normalize:
        q, k = q.abs() + 0.3, k.abs() + 0.3
    key_sum = state[..., 0].abs() + 0.2
    leaves = [x.detach().requires_grad_() for x in (q, k, v, gate, state, key_sum)]

    def run(q, k, v, gate, state, key_sum):
        first = (state, key_sum) if normalize else state
        out, last = gla_scan(
            q, k, v, gate, initial_state=first, return_final_state=True, backend=backend, **options
        )
        return (out, *last) if normalize else (out, last)

    if not normalize:
        run, leaves = partial(run, key_sum=None), leaves[:5]
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_second_derivative_of_a_fused_kernel_raises(backend):
    q, k, v, gate, _ = inputs(1, 8, 1)
    q.requires_grad_()

    def loss(q):
        return gla_scan(q, k, v, gate, backend=backend).square().sum()

    (gradient,) = torch.autograd.grad(loss(q), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"gla_scan.*backend='torch'"):
        torch.autograd.grad(gradient.sum(), q)
    with pytest.raises(NotImplementedError, match="gla_scan"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q.detach())


def test_derivatives_of_transforms():
    q, k, v, gate, _ = inputs(1, 7, 1, 3, 2, torch.float64)

    def loss(q, gate):
        return gla_scan(q, k, v, gate, backend="torch").square().sum()

    def plain(q, gate):
        return gla_scan(q, k, v, gate, backend="reference").square().sum()

    for first in (0, 1):
        second = torch.func.grad(lambda *x, i=first: torch.func.grad(loss, i)(*x).sum(), 1)
        expected = torch.func.grad(lambda *x, i=first: torch.func.grad(plain, i)(*x).sum(), 1)
        torch.testing.assert_close(second(q, gate), expected(q, gate))


@ON_BOTH
def test_functional_transforms(backend):
    q, k, v, gate, _ = inputs(3, 9, 1)

    def loss(q, gate, k, v):
        return gla_scan(*(x[None] for x in (q, k, v, gate)), backend=backend).square().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(q, gate, k, v)
    leaves = q.clone().requires_grad_(), gate.clone().requires_grad_()
    total = gla_scan(leaves[0], k, v, leaves[1], backend=backend).square().sum()
    for actual, expected in zip(each, torch.autograd.grad(total, leaves)):
        assert measure(actual, expected)[0] < 2e-6


@ON_BOTH
def test_only_the_gradients_asked_for(backend):
    q, k, v, gate, state = inputs(length=20)
    v.requires_grad_()
    gla_scan(q, k, v, gate, initial_state=state, backend=backend).sum().backward()
    assert v.grad is not None and q.grad is None and gate.grad is None and state.grad is None
    with torch.no_grad():
        assert not gla_scan(q, k, v, gate, backend=backend).requires_grad


# --- Registration and compilation -----------------------------------------------------------


@ON_BOTH
def test_opcheck(backend):
    checked = set()
    for sample in samples(OPERATOR, backend):
        if sample.label in ("one token", "packed normalised"):
            arguments = make_sample(sample, DEVICE, torch.float32)
            checked |= set(opcheck_calls(partial(evaluate, gla_scan, arguments, backend=backend)))
    prefix = "neuralops_ssm::gla_"
    expected = {
        "torch": {"scan_torch", "scan_torch_bwd"},
        "triton": {"scan_fwd", "scan_bwd", "chunks"},
    }
    assert checked == {prefix + name for name in expected[backend]}


@ON_BOTH
def test_compiles_to_one_graph_for_every_length(backend):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, gate, state):
        out, last = gla_scan(
            q, k, v, gate, initial_state=state, return_final_state=True, backend=backend
        )
        return out * 2, last

    compiled = torch.compile(step, backend=count, fullgraph=True)
    for length in (64, 65, 7):
        leaves = [x.requires_grad_() for x in inputs(length=length, heads=1)]
        results = []
        for function in (compiled, step):
            out, last = function(*leaves)
            results.append((out, last, *torch.autograd.grad(out.sum() + last.sum(), leaves)))
        for actual, value in zip(*results):
            torch.testing.assert_close(actual, value)
    assert len(graphs) <= 2


@ON_BOTH
def test_compiles_with_autograd_and_packed_sequences(backend):
    boundaries = torch.tensor([0, 10, 40], device=DEVICE)

    def loss(q, k, v, gate):
        return gla_scan(q, k, v, gate, cu_seqlens=boundaries, backend=backend).sum()

    leaves = [x.requires_grad_() for x in inputs(1, 40, 1)[:4]]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    for gradient, expected in zip(actual, torch.autograd.grad(loss(*leaves), leaves)):
        torch.testing.assert_close(gradient, expected)


def test_exports():
    class Mixer(torch.nn.Module):
        def forward(self, q, k, v, gate):
            return gla_scan(q, k, v, gate.sigmoid())

    length = torch.export.Dim("length", min=2, max=4096)
    dims = tuple({2: length} for _ in range(4))
    program = torch.export.export(Mixer(), inputs()[:4], dynamic_shapes=dims)
    tensors = inputs(length=33)[:4]
    torch.testing.assert_close(program.module()(*tensors), Mixer()(*tensors))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a CUDA device")
def test_cuda_graph_of_a_step():
    q, k, v, gate, state = inputs(length=1, key_width=64, value_width=64, dtype=torch.bfloat16)
    tokens = [x[:, :, 0] for x in (q, k, v, gate)]
    gla_step(*tokens, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, new_state = gla_step(*tokens, state)
    q.normal_(), k.normal_(), v.normal_()
    graph.replay()
    expected, expected_state = gla_step(*tokens, state)
    assert torch.equal(out, expected) and torch.equal(new_state, expected_state)


@pytest.mark.skipif(DEVICE == "cpu", reason="compilations are counted on a CUDA device")
def test_a_new_batch_or_length_compiles_nothing():
    from neuralops.ssm.gla import backward_kernels, forward_kernels, kernels

    def run(batch, length):
        leaves = [x.requires_grad_() for x in inputs(batch, length, 2, 64, 64, torch.bfloat16)[:4]]
        gla_scan(*leaves).sum().backward()

    def compiled():
        device = torch.cuda.current_device()
        return sum(
            len(kernel.device_caches[device][0])
            for kernel in (
                kernels.states_kernel, kernels.both_states_kernel, forward_kernels.outputs_kernel,
                backward_kernels.gradients_kernel, backward_kernels.values_kernel,
            )
        )  # fmt: skip

    for batch, length in ((1, 64), (300, 100), (1, 4096)):
        run(batch, length)
    before = compiled()
    for batch, length in ((1, 1), (3, 17), (5, 128), (7, 5000), (301, 33)):
        run(batch, length)
    assert compiled() == before


@pytest.mark.skipif(DEVICE == "cpu", reason="synchronisations are a CUDA device's")
@GATES
def test_packed_sequences_do_not_wait_for_the_device(scalar):
    q, k, v, gate, _ = inputs(1, 100, 1, scalar=scalar)
    boundaries = torch.tensor([0, 10, 90], device=DEVICE)
    for backend in ("triton", "torch"):
        gla_scan(q, k, v, gate, cu_seqlens=boundaries, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for backend in ("triton", "torch"):
            gla_scan(q, k, v, gate, cu_seqlens=boundaries, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- What can go wrong ----------------------------------------------------------------------


def good():
    q, k, v, gate, state = inputs(2, 6, 2, 3, 4)
    return {"q": q, "k": k, "v": v, "lambdas": gate, "initial_state": state}


def packed(*boundaries, dtype=torch.int32, batch=1):
    q, k, v, gate, _ = inputs(batch, 6, 2, 3, 4)
    cu_seqlens = torch.tensor(boundaries, dtype=dtype, device=DEVICE)
    return {"q": q, "k": k, "v": v, "lambdas": gate, "cu_seqlens": cu_seqlens}


def of(*shape):
    return torch.ones(shape, device=DEVICE)


WRONG = {
    "q is a list": ({"q": [1.0]}, TypeError, r"q must be a tensor \(B, H, L, Dk\), got list"),
    "integer k": ({"k": of(2, 2, 6, 3).int()}, TypeError, "k must be float16.*int32"),
    "sparse v": ({"v": of(2, 2, 6, 4).to_sparse()}, TypeError, "v must be a dense tensor"),
    "q of rank 3": ({"q": of(2, 6, 3)}, ValueError, r"q must have shape \(B, H, L, Dk\)"),
    "k's shape": (
        {"k": of(2, 2, 6, 5)},
        ValueError,
        r"k must have shape .* like q = \(2, 2, 6, 3\), got \(2, 2, 6, 5\)",
    ),
    "v's length": ({"v": of(2, 2, 7, 4)}, ValueError, r"v must have shape \(B, H, L, Dv\)"),
    "gates of rank 2": (
        {"lambdas": of(2, 6)},
        ValueError,
        r"lambdas must have shape .*\(B, H, L\)",
    ),
    "gates' width": ({"lambdas": of(2, 2, 6, 4)}, ValueError, "lambdas must have shape"),
    "scalar gates' length": ({"lambdas": of(2, 2, 5)}, ValueError, "lambdas must have shape"),
    "gates are a float": ({"lambdas": 0.9}, TypeError, "lambdas must be a tensor"),
    "another device": (
        {"v": torch.ones(2, 2, 6, 4, device="meta")},
        ValueError,
        "v must be on .* like q, got meta",
    ),
    "state's shape": (
        {"initial_state": of(2, 2, 3, 3)},
        ValueError,
        r"initial_state must have shape \(B, H, Dk, Dv\) = \(2, 2, 3, 4\)",
    ),
    "a tuple without normalize": (
        {"initial_state": (of(2, 2, 3, 4), of(2, 2, 3))},
        TypeError,
        "initial_state must be a tensor",
    ),
    "a tensor with normalize": (
        {"normalize": True},
        TypeError,
        r"initial_state must be the tuple \(S, Z\) with normalize=True",
    ),
    "Z's shape": (
        {"normalize": True, "initial_state": (of(2, 2, 3, 4), of(2, 2, 4))},
        ValueError,
        r"Z of initial_state must have shape \(B, H, Dk\) = \(2, 2, 3\)",
    ),
    "Z is None": (
        {"normalize": True, "initial_state": (of(2, 2, 3, 4), None)},
        TypeError,
        "Z of initial_state must be a tensor",
    ),
    "scale is a tensor": ({"scale": of(1)}, TypeError, "scale must be a Python number"),
    "eps is nan": ({"eps": math.nan}, ValueError, "eps.*nan"),
    "flag is an int": ({"normalize": 1}, TypeError, "normalize must be True or False"),
    "log_decay is None": ({"log_decay": None}, TypeError, "log_decay must be True or False"),
    "unknown backend": ({"backend": "cuda"}, ValueError, "backend must be one of triton"),
    "unknown keyword": ({"gate": 1}, TypeError, "gate"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("backend", [None, "triton", "torch", "reference"])
def test_wrong_arguments(case, backend):
    changed, error, message = case
    with pytest.raises(error, match=message):
        gla_scan(**{"backend": backend, **good(), **changed})


PACKED = {
    "packed state's shape": (
        {"initial_state": of(1, 2, 3, 4)},
        (0, 3, 6),
        r"initial_state must have shape \(n, H, Dk, Dv\) = \(2, 2, 3, 4\)",
    ),
    "start at 1": ({}, (1, 6), "must start at 0, got 1"),
    "decrease": ({}, (0, 4, 3, 6), "must not decrease, got 4 then 3"),
    "past the end": ({}, (0, 7), "must end at the length 6 or before, got 7"),
}


@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED.keys())
def test_wrong_packed_arguments(case, monkeypatch):
    monkeypatch.setenv("NEURALOPS_VALIDATE", "1")
    changed, boundaries, message = case
    with pytest.raises(ValueError, match=message):
        gla_scan(**{**packed(*boundaries), **changed})


STEPS = {
    "q of rank 4": ({"q": of(2, 2, 1, 3)}, ValueError, r"gla_step: q must have shape \(B, H, Dk\)"),
    "v's shape": ({"v": of(2, 3, 4)}, ValueError, r"gla_step: v must have shape \(B, H, Dv\)"),
    "gates' shape": ({"lambdas": of(2, 1)}, ValueError, "gla_step: lambdas must have shape"),
    "state's shape": ({"state": of(2, 2, 4, 4)}, ValueError, "gla_step: state must have shape"),
    "state is an int": ({"state": 0}, TypeError, "gla_step: state must be a tensor"),
    "no tuple": ({"normalize": True}, TypeError, r"gla_step: state must be the tuple \(S, Z\)"),
}


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS.keys())
def test_wrong_arguments_of_a_step(case):
    changed, error, message = case
    arguments = {
        "q": of(2, 2, 3), "k": of(2, 2, 3), "v": of(2, 2, 4), "lambdas": of(2, 2, 3),
        "state": of(2, 2, 3, 4),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        gla_step(**{**arguments, **changed})


# --- Memory, registration, import -----------------------------------------------------------


def test_torch_backward_keeps_the_inputs_only():
    leaves = [x.requires_grad_() for x in inputs(1, 1024, 1, 16, 16)[:4]]
    saved = []

    def pack(tensor):
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gla_scan(*leaves, backend="torch")
    assert sum(saved) <= sum(x.untyped_storage().nbytes() for x in leaves)


def test_explained_and_registered():
    assert neuralops.core.get_operator("gla_scan") is OPERATOR
    q, k, v, gate, _ = inputs()
    explanation = neuralops.core.explain(gla_scan, q.double(), k, v, gate)
    assert explanation.backend == "torch"
    assert any("float64" in reason for reason in explanation.reasons["triton"])
    wide = torch.ones(1, 1, 2, 300, device=DEVICE)
    reasons = neuralops.core.explain(gla_scan, wide, wide, wide, wide).reasons["triton"]
    assert sum("limit of 256" in reason for reason in reasons) == 2


def test_import_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from neuralops.ssm import gla_scan\n"
        "x = torch.rand(1, 1, 5, 2, requires_grad=True)\n"
        "gla_scan(x, x, x, x).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
