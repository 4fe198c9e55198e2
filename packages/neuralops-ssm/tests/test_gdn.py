"""gdn_scan, nlms_scan and their steps: against the oracle, and what users do with them."""

import copy
import itertools
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

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
from neuralops.ssm import gdn_scan, gdn_step, nlms_scan, nlms_step
from neuralops.ssm.gdn import triton_impl
from neuralops.ssm.gdn.op import NLMS, OPERATOR

BACKENDS = [b for b in BACKENDS if b.values[0] in OPERATOR.backends]
ON_BOTH = pytest.mark.parametrize("backend", BACKENDS)
SCANS = pytest.mark.parametrize("scan", [gdn_scan, nlms_scan])
STEP = {gdn_scan: gdn_step, nlms_scan: nlms_step}


def inputs(
    length=65, heads=2, width=8, *, batch=1, group=1, dtype=torch.float32, seed=0, states=None
):
    """``q, k, v``, two gates in [0, 1], which serve in either order, and a state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    shape = (batch, heads, length, width)
    q, k = normal(*shape), functional.normalize(normal(*shape), dim=-1)
    v = normal(batch, heads * group, length, width + 2)
    one = 0.2 + 0.8 * torch.rand(v.shape[:3], generator=generator)
    other = 0.2 + 0.8 * torch.rand(v.shape[:3], generator=generator)
    state = normal(states or batch, heads * group, width, width + 2)
    return (*(x.to(DEVICE, dtype) for x in (q, k, v, one, other)), state.to(DEVICE))


def gates_of(scan, *, strength, decay):
    return (decay, strength) if scan is nlms_scan else (strength, decay)


def assert_matches(results, oracle, dtype=torch.float32):
    for name, result in results.items():
        tolerance = TOLERANCES[dtype]
        bound = tolerance.gradient if name.startswith("grad") else tolerance.output
        ratio, _ = measure(result, oracle[name])
        assert ratio <= bound, f"{name}: {ratio:.2e} above {bound:.2e}"


def matches_oracle(scan, arguments, backend, dtype=torch.float32):
    oracle = evaluate(scan, arguments, dtype=torch.float64, backend="reference")
    with poisoned_memory():
        results = evaluate(scan, arguments, backend=backend)
    assert_matches(results, oracle, dtype)
    return results


# --- Against the oracle ---------------------------------------------------------------------


def _cases():
    """The whole matrix for one operator; for the other what its own formula changes."""
    rest = ("L64 D16", "one token", "packed", "grouped 2", "L129 D64", "L1000 D64", "L2000 D100")
    for operator in (OPERATOR, NLMS):
        for case in sample_matrix(operator):
            backend, dtype, sample = case.values
            interpreted = backend == "triton" and INTERPRETING
            if operator is NLMS and (interpreted or DEVICE == "cpu") and sample.label not in rest:
                continue
            if interpreted and operator is NLMS and dtype == torch.float16:
                continue
            if backend in operator.backends:
                name = f"{operator.name}-{case.id}"
                yield pytest.param(operator, *case.values, id=name, marks=case.marks)


@pytest.mark.parametrize(("operator", "backend", "dtype", "sample"), list(_cases()))
def test_matches_oracle(operator, backend, dtype, sample):
    with poisoned_memory():
        errors = check_sample(operator, sample, backend=backend, device=DEVICE, dtype=dtype)
    assert [str(error) for error in errors if not error.passed] == []


@pytest.mark.parametrize("backend", BACKENDS[1:])
@SCANS
def test_split_along_the_sequence(backend, scan, monkeypatch):
    monkeypatch.setattr(triton_impl, "ENOUGH_PROGRAMS", 100)
    monkeypatch.setattr(triton_impl, "SHORTEST_PART", 1)
    *tokens, state = inputs(130, 1, 16, group=2)
    assert triton_impl._split(tokens[0], tokens[2], triton_impl.LEAN)[1] == 3
    options = {"initial_state": state, "return_final_state": True}
    matches_oracle(scan, (tokens, options), backend)
    matches_oracle(scan, (tokens, {}), backend)


def test_reference_is_the_closed_form_without_the_error():
    """Keys orthogonal to all before them: nothing is recalled, and the scan is a decayed sum."""
    q, k, v, beta, alpha, _ = inputs(8, 1, 8, dtype=torch.float64)
    k = torch.eye(8, dtype=torch.float64, device=DEVICE)[None, None]
    expected = torch.zeros_like(v)
    for t, s in itertools.product(range(8), range(8)):
        if s <= t:
            weight = alpha[0, 0, s + 1 : t + 1].prod() * beta[0, 0, s] * (q[0, 0, t] @ k[0, 0, s])
            expected[0, 0, t] += weight * v[0, 0, s]
    o = gdn_scan(q, k, v, beta, alpha, backend="reference")
    torch.testing.assert_close(o, expected)
    o = nlms_scan(q, k, v, decay=alpha, step=2 * beta, backend="reference")
    torch.testing.assert_close(o, expected)


def test_reference_recalls_what_was_written():
    """Strength 1, decay 1 and keys of length 1: reading with the last key gives its value."""
    _, k, v, _, _, _ = inputs(20, dtype=torch.float64)
    k = functional.normalize(k, dim=-1)
    ones = torch.ones(v.shape[:3], dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(gdn_scan(k, k, v, ones, ones, backend="reference"), v)


def test_reference_of_nlms_is_the_rule():
    q, k, v, decay, step, _ = inputs(6, 1, 3, dtype=torch.float64)
    state = torch.zeros(3, 5, dtype=torch.float64, device=DEVICE)
    outputs = []
    for t in range(6):
        key = k[0, 0, t]
        error = v[0, 0, t] - state.T @ key
        state = decay[0, 0, t] * state
        state = state + step[0, 0, t] / (1 + key @ key) * torch.outer(key, error)
        outputs.append(state.T @ q[0, 0, t])
    o = nlms_scan(q, k, v, decay, step, backend="reference")
    torch.testing.assert_close(o[0, 0], torch.stack(outputs))


@ON_BOTH
@SCANS
@pytest.mark.parametrize("log_decay", [False, True])
def test_decays_of_zero_and_one(backend, scan, log_decay):
    """A plain sum, clean restarts, several in one chunk; the gradients are the recurrence's own."""
    q, k, v, strength, _, state = inputs(100, 1)
    for zeros in ([], [0, 30, 31, 64], list(range(40, 90))):
        decay = torch.ones_like(strength)
        decay[..., zeros] = 0.0
        gates = gates_of(scan, strength=strength, decay=decay.log() if log_decay else decay)
        options = {"log_decay": log_decay, "initial_state": state, "return_final_state": True}
        results = matches_oracle(scan, ((q, k, v, *gates), options), backend)
        gradient = results["grad decay" if scan is nlms_scan else "grad alpha"]
        assert bool(gradient[..., zeros].any()) == (bool(zeros) and not log_decay)


@ON_BOTH
def test_a_decay_of_zero_restarts_gdn_but_not_the_error_of_nlms(backend):
    q, k, v, strength, decay, _ = inputs(40, 1)
    decay[..., 20] = 0.0
    o = gdn_scan(q, k, v, strength, decay, backend=backend)
    rest = [x[:, :, 20:] for x in (q, k, v, strength, decay)]
    assert measure(o[:, :, 20:], gdn_scan(*rest, backend=backend))[0] < 1e-6
    o = nlms_scan(q, k, v, decay, strength, backend=backend)
    alone = nlms_scan(*rest[:3], rest[4], rest[3], backend=backend)
    assert measure(o[:, :, 20:], alone)[0] > 1e-3


@ON_BOTH
@SCANS
def test_very_negative_log_gates_are_finite(backend, scan):
    q, k, v, strength, decay, _ = inputs(65, 1)
    for value in (-1e4, -50.0, -1e-7):
        gates = gates_of(scan, strength=strength, decay=torch.full_like(decay, value))
        matches_oracle(scan, ((q, k, v, *gates), {"log_decay": True}), backend)


@ON_BOTH
def test_strengths_to_two_and_repeated_keys(backend):
    """Negative eigenvalues, and keys so alike that powers of L would lose all digits."""
    q, k, v, strength, decay, _ = inputs(70, 1)
    k = functional.normalize(k[:, :, :1] + 0.05 * k, dim=-1)
    matches_oracle(gdn_scan, ((q, k, v, 1 + strength, torch.ones_like(decay)), {}), backend)
    matches_oracle(gdn_scan, ((q, k, v, 0 * strength, decay), {}), backend)


@ON_BOTH
def test_keys_of_any_length(backend):
    q, k, v, strength, decay, _ = inputs(70, 1)
    matches_oracle(gdn_scan, ((q, 1.3 * k, v, strength, decay), {}), backend)
    matches_oracle(gdn_scan, ((q, 9 * k, v, strength, decay), {"normalize_qk": True}), backend)
    matches_oracle(nlms_scan, ((q, 9 * k, v, decay, 2 * strength), {}), backend)


@ON_BOTH
def test_normalize_qk_is_the_formula_and_zero_keys_are_safe(backend):
    q, k, v, beta, alpha, _ = inputs(20)
    k[:, :, 3] = 0.0

    def unit(x):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    o = gdn_scan(q, k, v, beta, alpha, normalize_qk=True, backend=backend)
    assert measure(o, gdn_scan(unit(q), unit(k), v, beta, alpha, backend="reference"))[0] < 1e-6
    matches_oracle(gdn_scan, ((q, k, v, beta, alpha), {"normalize_qk": True}), backend)


@ON_BOTH
@pytest.mark.parametrize("group", [2, 4])
def test_grouped_heads_equal_repeated_ones(backend, group):
    q, k, v, beta, alpha, state = inputs(33, 2, group=group)
    options = {"initial_state": state, "return_final_state": True, "backend": backend}
    o, last = gdn_scan(q, k, v, beta, alpha, **options)
    repeated = [x.repeat_interleave(group, 1) for x in (q, k)]
    expected, expected_last = gdn_scan(*repeated, v, beta, alpha, **options)
    assert measure(o, expected)[0] < 1e-6
    assert measure(last, expected_last)[0] < 1e-6


@ON_BOTH
def test_the_reference_packages_gdn_is_nlms(backend):
    """Its `gdn_scan_triton(q, k, v, beta, alpha)`: error from the undecayed state, beta decays."""
    q, k, v, beta, alpha, _ = inputs(12, 1, 4)
    state = torch.zeros(4, 6, dtype=torch.float64)
    outputs = []
    q_, k_, v_, b_, a_ = (x[0, 0].double().cpu() for x in (q, k, v, beta, alpha))
    for t in range(12):
        error = v_[t] - k_[t] @ state
        state = b_[t] * state + a_[t] * torch.outer(k_[t], error) / (1 + k_[t] @ k_[t])
        outputs.append(q_[t] @ state)
    o = nlms_scan(q, k, v, decay=beta, step=alpha, backend=backend)
    assert measure(o[0, 0].cpu(), torch.stack(outputs))[0] < 1e-6


# --- States, packed sequences, steps --------------------------------------------------------


@ON_BOTH
@SCANS
def test_a_prefix_hands_its_state_to_the_rest(backend, scan):
    *tokens, state = inputs(100, 1)
    options = {"return_final_state": True, "backend": backend}
    whole, last = scan(*tokens, initial_state=state, **options)
    outputs = []
    for part in (slice(0, 37), slice(37, 100)):
        o, state = scan(*(x[:, :, part] for x in tokens), initial_state=state, **options)
        outputs.append(o)
    assert measure(torch.cat(outputs, 2), whole)[0] < 2e-6
    assert measure(state, last)[0] < 2e-6


@ON_BOTH
@SCANS
def test_steps_continue_a_prefill(backend, scan):
    *tokens, _ = inputs(36, 1, dtype=torch.float16)
    options = {"return_final_state": True, "backend": backend}
    whole, last = scan(*tokens, **options)
    _, state = scan(*(x[:, :, :32] for x in tokens), **options)
    for t in range(32, 36):
        before = state.clone()
        o, new_state = STEP[scan](*(x[:, :, t] for x in tokens), state, backend=backend)
        assert torch.equal(state, before), "a step must not change the state it is given"
        assert o.dtype == torch.float16 and new_state.dtype == torch.float32
        assert measure(o, whole[:, :, t])[0] < 2e-3
        state = new_state
    assert measure(state, last)[0] < 2e-3


@ON_BOTH
@SCANS
def test_steps_equal_the_scan_in_float32(backend, scan):
    *tokens, state = inputs(6, 1, group=2)
    options = {"return_final_state": True, "backend": backend}
    whole, last = scan(*tokens, initial_state=state, scale=0.5, **options)
    for t in range(6):
        step = STEP[scan](*(x[:, :, t] for x in tokens), state, scale=0.5, backend=backend)
        o, state = step
        assert measure(o, whole[:, :, t])[0] < 1e-6
    assert measure(state, last)[0] < 1e-6


@ON_BOTH
def test_step_without_a_state(backend):
    q, k, v, beta, alpha, state = (x[:, :, 0] if x.dim() == 4 else x for x in inputs(1))
    beta, alpha, state = beta[..., 0], alpha[..., 0], inputs(1)[-1]
    o, new_state = gdn_step(q, k, v, beta, alpha, None, backend=backend)
    expected, expected_state = gdn_step(
        q, k, v, beta, alpha, torch.zeros_like(state), backend=backend
    )
    assert torch.equal(o, expected) and torch.equal(new_state, expected_state)
    torch.testing.assert_close(o, (q * k).sum(-1, keepdim=True) * beta[..., None] * v)


@ON_BOTH
@SCANS
def test_each_packed_sequence_equals_itself_alone(backend, scan):
    lengths = [0, 15, 0, 1, 64, 0, 33, 0]
    *tokens, state = inputs(sum(lengths), 1, states=len(lengths))
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    options = {"return_final_state": True, "backend": backend}
    o, last = scan(*tokens, initial_state=state, cu_seqlens=boundaries, **options)
    for i, parts in enumerate(zip(*(x.split(lengths, 2) for x in tokens))):
        alone, last_alone = scan(*parts, initial_state=state[i : i + 1], **options)
        span = slice(int(boundaries[i]), int(boundaries[i + 1]))
        assert measure(o[:, :, span], alone)[0] < 1e-6
        assert measure(last[i : i + 1], last_alone)[0] < 1e-6


@ON_BOTH
def test_rows_past_the_last_boundary_are_zero(backend):
    *tokens, _ = (x.requires_grad_() for x in inputs(128, 1))
    boundaries = torch.tensor([0, 100], dtype=torch.int32, device=DEVICE)
    with poisoned_memory():
        o = gdn_scan(*tokens, cu_seqlens=boundaries, backend=backend)
        gradients = torch.autograd.grad(o.sum(), tokens)
    for tensor in (o, *gradients):
        assert torch.equal(tensor[:, :, 100:], torch.zeros_like(tensor[:, :, 100:]))
        assert bool(tensor[:, :, 1:100].any())


@ON_BOTH
def test_no_packed_sequence_at_all(backend):
    *tokens, _ = (x.requires_grad_() for x in inputs(20, 1))
    boundaries = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    o, last = gdn_scan(*tokens, cu_seqlens=boundaries, return_final_state=True, backend=backend)
    assert not o.any() and last.shape == (0, 1, 8, 10)
    assert not any(g.any() for g in torch.autograd.grad(o.sum(), tokens))


@ON_BOTH
def test_padding_is_left_out_by_giving_lengths(backend):
    *tokens, _ = inputs(8, 1)
    boundaries = torch.tensor([0, 3], device=DEVICE)
    options = {"return_final_state": True, "backend": backend}
    _, state = gdn_scan(*tokens, cu_seqlens=boundaries, **options)
    _, alone = gdn_scan(*(x[:, :, :3] for x in tokens), **options)
    assert measure(state, alone)[0] < 1e-6


@pytest.mark.skipif(INTERPRETING, reason="2050 documents take minutes in the interpreter")
def test_many_short_documents():
    *tokens, _ = inputs(2050 * 16, 1, 4)
    boundaries = torch.arange(0, 2051 * 16, 16, device=DEVICE)
    o = gdn_scan(*tokens, cu_seqlens=boundaries)
    rows = [x.unflatten(2, (2050, 16)).transpose(1, 2)[0] for x in tokens]
    alone = gdn_scan(*rows)
    assert measure(o.view(2050, 16, 6), alone[:, 0])[0] < 1e-6


@ON_BOTH
@SCANS
def test_gradient_of_the_final_state_alone(backend, scan):
    leaves = [x.requires_grad_() for x in inputs(9, 1)]
    *tokens, state = leaves
    gradients = []
    for on in (backend, "reference"):
        _, last = scan(*tokens, initial_state=state, return_final_state=True, backend=on)
        gradients.append(torch.autograd.grad(last.sum(), leaves, allow_unused=True))
    for actual, expected in zip(*gradients):
        expected = torch.zeros_like(actual) if expected is None else expected
        torch.testing.assert_close(actual, expected)


@ON_BOTH
def test_empty_sequences_batches_and_heads(backend):
    for batch, heads, length in ((2, 1, 0), (0, 1, 5), (2, 0, 5)):
        leaves = [x.requires_grad_() for x in inputs(length, heads, batch=batch)]
        *tokens, state = leaves
        o, last = gdn_scan(*tokens, initial_state=state, return_final_state=True, backend=backend)
        assert o.shape == tokens[2].shape and last.shape == state.shape
        gradients = torch.autograd.grad(o.sum() + (3 * last).sum(), leaves)
        if length == 0:
            assert torch.equal(last, state)
            assert torch.equal(gradients[-1], torch.full_like(state, 3.0))


# --- Strides, dtypes, determinism -----------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("gradient", ["stride 0", "transposed", "sliced"])
def test_strides_of_inputs_and_gradients(backend, gradient):
    length, width = 20, 8
    q, k, v, beta, alpha, _ = inputs(length, 2, width, batch=2)
    tokens = (q, k, v[..., :width].contiguous(), beta, alpha)
    layouts = {
        "contiguous": tokens,
        "length first": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tokens),
        "expanded": tuple(x[:1].expand(2, *x.shape[1:]) for x in tokens),
        "fused": (*torch.cat(tokens[:3], 3).split(width, 3), beta, alpha),
        "every other": tuple(x.repeat_interleave(2, -1)[..., ::2] for x in tokens),
    }
    grads = {
        "stride 0": torch.ones((), device=DEVICE).expand(2, 2, length, width),
        "transposed": torch.randn(width, length, 2, 2, device=DEVICE).permute(3, 2, 1, 0),
        "sliced": torch.randn(2, 2, 2 * length, 2 * width, device=DEVICE)[:, :, ::2, 3 : 3 + width],
    }
    for name, layout in layouts.items():
        results = []
        for dtype, on in ((torch.float32, backend), (torch.float64, "reference")):
            leaves = [x.detach().to(dtype).requires_grad_() for x in layout]
            o = gdn_scan(*leaves, backend=on)
            results.append((o, *torch.autograd.grad(o, leaves, grads[gradient].to(dtype))))
        assert results[0][0].is_contiguous()
        for actual, expected in zip(*results):
            assert measure(actual.detach(), expected.detach())[0] < 2e-5, name


@ON_BOTH
def test_mixed_dtypes_and_their_gradients(backend):
    dtypes = (torch.float16, torch.float32, torch.float16, torch.float32, torch.float16)
    *tokens, state = inputs(20)
    leaves = [x.to(dtype).requires_grad_() for x, dtype in zip(tokens, dtypes)]
    state = state.bfloat16().requires_grad_()
    o, last = gdn_scan(*leaves, initial_state=state, return_final_state=True, backend=backend)
    assert o.dtype == torch.float16 and last.dtype == torch.float32
    gradients = torch.autograd.grad(o.float().sum() + last.sum(), (*leaves, state))
    assert [g.dtype for g in gradients] == [*dtypes, torch.bfloat16]
    wide = [x.detach().double().requires_grad_() for x in (*leaves, state)]
    o, last = gdn_scan(*wide[:-1], initial_state=wide[-1], return_final_state=True)
    for actual, expected in zip(gradients, torch.autograd.grad(o.sum() + last.sum(), wide)):
        assert measure(actual, expected)[0] < TOLERANCES[torch.float16].gradient


def test_float64_is_computed_in_float64():
    *tokens, _ = inputs(dtype=torch.float64)
    o, state = gdn_scan(*tokens, return_final_state=True)
    assert o.dtype == state.dtype == torch.float64
    assert measure(o, gdn_scan(*tokens, backend="reference"))[0] < 1e-14


@ON_BOTH
def test_autocast(backend):
    q, k, v, beta, alpha, _ = inputs(20)
    expected = gdn_scan(q, k, v, beta, alpha, backend=backend)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(gdn_scan(q, k, v, beta, alpha, backend=backend), expected)


@ON_BOTH
@SCANS
def test_same_bits_every_time(backend, scan):
    length = 70 if INTERPRETING else 3000
    *tokens, state = inputs(length, 1, group=2)
    arguments = (tokens, {"initial_state": state, "return_final_state": True})
    first = evaluate(scan, arguments, backend=backend)
    for _ in range(1 if INTERPRETING else 20 if DEVICE == "cuda" else 3):
        again = evaluate(scan, arguments, backend=backend)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device and 18 GiB of its memory")
def test_offsets_past_int32():
    memory = torch.empty(3, 2**20, 3072, dtype=torch.bfloat16, device=DEVICE)
    length = 1000
    views = [memory[1:, -length:, i * 64 : i * 64 + 64].unsqueeze(1) for i in range(3)]
    q, k, v = (x.copy_(torch.randn_like(x)) for x in views)
    k.copy_(functional.normalize(k.float(), dim=-1))
    beta, alpha = (torch.rand(2, 1, length, device=DEVICE) for _ in range(2))
    arguments = ((q, k, v, beta, alpha), {})
    oracle = evaluate(gdn_scan, arguments, dtype=torch.float64, backend="reference")
    results = evaluate(gdn_scan, arguments, backend="triton")
    assert_matches(results, oracle, torch.bfloat16)


@pytest.mark.skipif(DEVICE == "cpu", reason="large grids take minutes on a CPU")
def test_large_grids():
    *tokens, _ = (x.requires_grad_() for x in inputs(16, 2, 8, batch=32800))
    o = gdn_scan(*tokens)
    assert measure(o.detach(), gdn_scan(*tokens, backend="torch").detach())[0] < 1e-6
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(o.sum(), tokens))


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(0, 100),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    group=st.sampled_from([1, 3]),
    scan=st.sampled_from([gdn_scan, nlms_scan]),
    cuts=st.none() | st.lists(st.integers(0, 100), max_size=6),
    zeros=st.lists(st.integers(0, 99), max_size=4),
    seed=st.integers(0, 2**31),
)
def test_torch_equals_the_reference_on_any_input(length, widths, group, scan, cuts, zeros, seed):
    q, k, v, strength, decay, state = inputs(
        length, 1, 9, group=group, dtype=torch.float64, seed=seed
    )
    q, k, v, state = q[..., : widths[0]], k[..., : widths[0]], v[..., : widths[1]], state.double()
    decay[..., [z for z in zeros if z < length]] = 0.0
    state, boundaries = state[:, :, : widths[0], : widths[1]], None
    if cuts is not None:
        cuts = sorted(min(cut, length) for cut in cuts)
        boundaries = torch.tensor([0, *cuts], device=DEVICE)
        state = state.expand(len(cuts), -1, -1, -1)
    arguments = (
        (q, k, v, *gates_of(scan, strength=strength, decay=decay)),
        {"cu_seqlens": boundaries, "initial_state": state, "return_final_state": True},
    )
    expected = evaluate(scan, arguments, backend="reference")
    assert_matches(evaluate(scan, arguments, backend="torch"), expected, torch.float64)


# --- Derivatives ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    ("scan", "options"),
    [
        (gdn_scan, {}),
        (gdn_scan, {"normalize_qk": True, "log_decay": True, "scale": 0.3}),
        (nlms_scan, {}),
        (gdn_scan, {"cu_seqlens": [0, 2, 2, 5]}),
        (nlms_scan, {"cu_seqlens": [0, 2, 2, 5]}),
    ],
    ids=str,
)
def test_first_and_second_derivatives(backend, scan, options):
    options = dict(options)
    boundaries = options.pop("cu_seqlens", None)
    if boundaries is not None:
        options["cu_seqlens"] = torch.tensor(boundaries, device=DEVICE)
    q, k, v, one, other, state = inputs(
        6, 1, 2, group=2, dtype=torch.float64, states=3 if boundaries else 1
    )
    if options.get("log_decay"):
        other = other.log()
    leaves = [x.double().requires_grad_() for x in (q, k, v[..., :2], one, other, state[..., :2])]

    def run(*leaves):
        *tokens, state = leaves
        return scan(
            *tokens, initial_state=state, return_final_state=True, backend=backend, **options
        )

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_second_derivative_of_a_fused_kernel_raises(backend):
    q, *others, _ = inputs(8, 1)
    q.requires_grad_()

    def loss(q):
        return gdn_scan(q, *others, backend=backend).square().sum()

    (gradient,) = torch.autograd.grad(loss(q), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"gdn_scan.*backend='torch'"):
        torch.autograd.grad(gradient.sum(), q)
    with pytest.raises(NotImplementedError, match="gdn_scan"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q.detach())


def test_second_derivative_in_functional_form():
    q, *others, _ = inputs(5, 1, dtype=torch.float64)

    def loss(q, backend):
        return gdn_scan(q, *others, backend=backend).square().sum()

    seconds = [
        torch.func.grad(lambda q: torch.func.grad(loss)(q, on).square().sum())(q)  # noqa: B023
        for on in ("torch", "reference")
    ]
    torch.testing.assert_close(*seconds)


@ON_BOTH
def test_functional_transforms(backend):
    tokens = inputs(9, 1, 4, batch=2)[:5]

    def loss(*tokens):
        return gdn_scan(*(x[None] for x in tokens), backend=backend).square().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(5))))(*tokens)
    leaves = [x.clone().requires_grad_() for x in tokens]
    total = gdn_scan(*leaves, backend=backend).square().sum()
    for actual, expected in zip(each, torch.autograd.grad(total, leaves)):
        torch.testing.assert_close(actual, expected)


@ON_BOTH
def test_only_the_gradients_asked_for(backend):
    q, k, v, beta, alpha, state = inputs(20)
    v.requires_grad_()
    gdn_scan(q, k, v, beta, alpha, initial_state=state, backend=backend).sum().backward()
    assert v.grad is not None
    assert all(x.grad is None for x in (q, k, beta, alpha, state))
    assert not gdn_scan(q, k, v.detach(), beta, alpha, backend=backend).requires_grad
    with torch.no_grad():
        assert not gdn_scan(q, k, v, beta, alpha, backend=backend).requires_grad


# --- Registration and compilation -----------------------------------------------------------


@ON_BOTH
def test_opcheck(backend):
    checked = set()
    for operator in (OPERATOR, NLMS):
        for sample in samples(operator, backend):
            if sample.label in ("one token", "packed"):
                arguments = make_sample(sample, DEVICE, torch.float32)
                run = partial(evaluate, operator.load(), arguments, backend=backend)
                checked |= set(opcheck_calls(run))
    names = {"torch": ("torch", "torch_bwd"), "triton": ("fwd", "bwd")}
    assert checked == {f"neuralops_ssm::gdn_scan_{name}" for name in names[backend]}


@ON_BOTH
@SCANS
def test_compiles_to_one_graph_for_every_length(backend, scan):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(*leaves):
        *tokens, state = leaves
        o, last = scan(*tokens, initial_state=state, return_final_state=True, backend=backend)
        return o * 2, last

    compiled = torch.compile(step, backend=count, fullgraph=True)
    for length in (64, 65, 7):
        leaves = [x.requires_grad_() for x in inputs(length, 1)]
        actual = compiled(*leaves)
        actual += torch.autograd.grad(sum(x.sum() for x in actual), leaves)
        expected = step(*leaves)
        expected += torch.autograd.grad(sum(x.sum() for x in expected), leaves)
        torch.testing.assert_close(actual, expected)
    assert len(graphs) <= 2


@ON_BOTH
def test_compiles_with_autograd_and_packed_sequences(backend):
    boundaries = torch.tensor([0, 10, 40], device=DEVICE)

    def loss(*tokens):
        return gdn_scan(*tokens, cu_seqlens=boundaries, backend=backend).sum()

    leaves = [x.requires_grad_() for x in inputs(40, 1)[:5]]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad(loss(*leaves), leaves))


def test_exports():
    class Mixer(torch.nn.Module):
        def forward(self, q, k, v, beta, alpha):
            return gdn_scan(q, k, v, beta.sigmoid(), alpha.sigmoid(), normalize_qk=True)

    tokens = inputs()[:5]
    dims = ({2: torch.export.Dim("length", min=2, max=4096)},) * 5
    program = torch.export.export(Mixer(), tokens, dynamic_shapes=dims)
    tokens = inputs(33)[:5]
    torch.testing.assert_close(program.module()(*tokens), Mixer()(*tokens))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a CUDA device")
def test_cuda_graph_of_a_step():
    *tokens, state = inputs(1)
    tokens = [x[:, :, 0] for x in tokens]
    gdn_step(*tokens, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, new_state = gdn_step(*tokens, state)
    tokens[0].normal_(), tokens[2].normal_()
    graph.replay()
    expected_o, expected_state = gdn_step(*tokens, state)
    assert torch.equal(o, expected_o) and torch.equal(new_state, expected_state)


@pytest.mark.skipif(DEVICE == "cpu", reason="synchronisations are a CUDA device's")
def test_packed_sequences_do_not_wait_for_the_device():
    *tokens, _ = inputs(100)
    boundaries = torch.tensor([0, 10, 90], device=DEVICE)
    for backend in OPERATOR.backends[:-1]:
        gdn_scan(*tokens, cu_seqlens=boundaries, backend=backend)
        torch.cuda.set_sync_debug_mode("error")
        try:
            gdn_scan(*tokens, cu_seqlens=boundaries, backend=backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --- What can go wrong ----------------------------------------------------------------------


def good(**changed):
    q, k, v, beta, alpha, state = inputs(6, 2, 3, batch=2, group=2)
    arguments = {"q": q, "k": k, "v": v, "beta": beta, "alpha": alpha, "initial_state": state}
    return {**arguments, **changed}


def packed(*boundaries, dtype=torch.int32, batch=1, **changed):
    q, k, v, beta, alpha, _ = inputs(6, 2, 3, batch=batch)
    arguments = {"q": q, "k": k, "v": v, "beta": beta, "alpha": alpha}
    cu_seqlens = torch.tensor(boundaries, dtype=dtype, device=DEVICE)
    return {**arguments, "cu_seqlens": cu_seqlens, **changed}


def ones(*shape, device=DEVICE):
    return torch.ones(shape, device=device)


WRONG = {
    "q is a list": (good(q=[1.0]), TypeError, r"q must be a tensor \(B, H, L, Dk\), got list"),
    "sparse k": (good(k=ones(2, 2, 6, 3).to_sparse()), TypeError, "k must be a dense tensor"),
    "integer v": (good(v=ones(2, 4, 6, 5).int()), TypeError, "v must be float16.*int32"),
    "boolean beta": (good(beta=ones(2, 4, 6).bool()), TypeError, "beta must be float16"),
    "q of rank 3": (good(q=ones(2, 6, 3)), ValueError, r"q must have shape \(B, H, L, Dk\)"),
    "k's shape": (
        good(k=ones(2, 2, 6, 4)),
        ValueError,
        r"k must have shape \(B, H, L, Dk\) like q = \(2, 2, 6, 3\), got \(2, 2, 6, 4\)",
    ),
    "v's length": (good(v=ones(2, 4, 7, 5)), ValueError, r"v must have shape \(B, Hv, L, Dv\) ="),
    "v's heads": (good(v=ones(2, 3, 6, 5)), ValueError, "a multiple of the 2 heads.*got 3"),
    "alpha for each channel": (
        good(alpha=ones(2, 4, 6, 3)),
        ValueError,
        r"alpha must have shape \(B, Hv, L\), got shape \(2, 4, 6, 3\)",
    ),
    "beta's heads": (good(beta=ones(2, 2, 6)), ValueError, r"beta must have .*= \(2, 4, 6\)"),
    "another device": (
        good(alpha=ones(2, 4, 6, device="meta")),
        ValueError,
        "alpha must be on .* like q, got meta; move it",
    ),
    "state's shape": (
        good(initial_state=ones(2, 4, 5, 3)),
        ValueError,
        r"initial_state must have shape \(B, Hv, Dk, Dv\) = \(2, 4, 3, 5\)",
    ),
    "state's rank": (good(initial_state=ones(3, 5)), ValueError, "initial_state must have shape"),
    "packed state's shape": (
        packed(0, 3, 6, initial_state=ones(1, 2, 3, 5)),
        ValueError,
        r"initial_state must have shape \(n, Hv, Dk, Dv\).*= \(2, 2, 3, 5\)",
    ),
    "scale is a string": (good(scale="1"), TypeError, "scale must be a Python number"),
    "scale is nan": (good(scale=float("nan")), ValueError, "scale.*nan"),
    "flag is an int": (good(log_decay=1), TypeError, "log_decay must be True or False"),
    "normalize is None": (good(normalize_qk=None), TypeError, "normalize_qk must be True or"),
    "return_final_state": (good(return_final_state="yes"), TypeError, "return_final_state"),
    "cu_seqlens is a list": (packed(0, cu_seqlens=[0]), TypeError, "cu_seqlens must be an"),
    "float cu_seqlens": (packed(0, 6, dtype=torch.float32), TypeError, "cu_seqlens must be an"),
    "cu_seqlens and B 2": (packed(0, 6, batch=2), ValueError, "batch size must be 1, got 2"),
    "unknown backend": (good(backend="cuda"), ValueError, "backend must be one of .*got 'cuda'"),
    "unknown keyword": (good(reverse=True), TypeError, "reverse"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("backend", [None, "triton", "torch", "reference"])
def test_wrong_arguments(case, backend):
    arguments, error, message = case
    with pytest.raises(error, match=message):
        gdn_scan(**{"backend": backend, **arguments})


def test_wrong_arguments_of_nlms():
    q, k, v, decay, step, _ = inputs(6)
    with pytest.raises(ValueError, match=r"nlms_scan: step must have shape \(B, Hv, L\) ="):
        nlms_scan(q, k, v, decay, step[:, :1])
    with pytest.raises(TypeError, match="nlms_scan: decay must be a tensor"):
        nlms_scan(q, k, v, 0.9, step)
    with pytest.raises(TypeError, match="normalize_qk"):
        nlms_scan(q, k, v, decay, step, normalize_qk=True)


BOUNDARIES = {
    "start at 1": ((1, 6), "must start at 0, got 1"),
    "decrease": ((0, 4, 3, 6), "must not decrease, got 4 then 3"),
    "past the end": ((0, 7), "must end at the length 6 or before, got 7"),
}


@pytest.mark.parametrize("case", BOUNDARIES.values(), ids=BOUNDARIES.keys())
def test_wrong_boundaries(case, monkeypatch):
    monkeypatch.setenv("NEURALOPS_VALIDATE", "1")
    values, message = case
    with pytest.raises(ValueError, match=message):
        gdn_scan(**packed(*values))


STEPS = {
    "q of rank 4": ({"q": ones(2, 2, 1, 3)}, ValueError, r"gdn_step: q must have shape \(B, H"),
    "v's heads": ({"v": ones(2, 3, 5)}, ValueError, "gdn_step: v must have a multiple of the 2"),
    "v's batch": ({"v": ones(1, 4, 5)}, ValueError, r"gdn_step: v must have shape \(B, Hv, Dv\) ="),
    "alpha's rank": ({"alpha": ones(2, 4, 1)}, ValueError, r"alpha must have shape \(B, Hv\)"),
    "beta is a number": ({"beta": 1.0}, TypeError, "gdn_step: beta must be a tensor"),
    "state's shape": ({"state": ones(2, 4, 5, 3)}, ValueError, r"state must .*= \(2, 4, 3, 5\)"),
    "another device": (
        {"state": ones(2, 4, 3, 5, device="meta")},
        ValueError,
        "gdn_step: state must be on .* like q, got meta",
    ),
}


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS.keys())
def test_wrong_arguments_of_a_step(case):
    changed, error, message = case
    q, v, gate = ones(2, 2, 3), ones(2, 4, 5), ones(2, 4)
    arguments = {"q": q, "k": q, "v": v, "beta": gate, "alpha": gate, "state": None}
    with pytest.raises(error, match=message):
        gdn_step(**{**arguments, **changed})


# --- Memory, threads, modules ---------------------------------------------------------------


@ON_BOTH
def test_threads(backend):
    tokens = inputs(33, 1)[:5]
    expected = gdn_scan(*tokens, backend=backend)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(gdn_scan(*tokens, backend=backend)))
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
            self.gates = torch.nn.Linear(8, 2, device=DEVICE)

        def forward(self, x):
            beta, alpha = self.gates(x).sigmoid().transpose(1, 2)[:, None].unbind(2)
            x = x[:, None]
            return gdn_scan(x, x, x, beta, alpha, normalize_qk=True)

    mixer, x = Mixer(), torch.randn(2, 20, 8, device=DEVICE)
    mixer(x).sum().backward()
    copied = copy.deepcopy(mixer)
    copied.zero_grad()
    torch.utils.checkpoint.checkpoint(copied, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(copied.gates.weight.grad, mixer.gates.weight.grad)


def test_explained_and_registered():
    assert neuralops.core.get_operator("gdn_scan") is OPERATOR
    assert neuralops.core.get_operator("nlms_scan") is NLMS
    q, *others, _ = inputs()
    for scan in (gdn_scan, nlms_scan):
        assert neuralops.core.explain(scan, q.double(), *others).backend == "torch"


def test_import_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from neuralops.ssm import gdn_scan\n"
        "x = torch.rand(1, 1, 5, 2, requires_grad=True)\n"
        "gdn_scan(x, x, x, x[..., 0], x[..., 1]).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
