"""fms_scan and fms_step: against the oracle, and what users do with them."""

import copy
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
from neuralops.ssm import fms_scan, fms_step
from neuralops.ssm.fms.op import OPERATOR
from neuralops.ssm.scalar_decay import triton_impl

ON_BOTH = pytest.mark.parametrize("backend", BACKENDS)
LINEAR = {"feature_map": "identity", "normalize": False}
EMPTY_AROUND = (0, 0, 15, 15, 16, 80, 100)


def inputs(
    batch=2, heads=3, length=65, width=8, columns=5, dtype=torch.float32, seed=0, states=None
):
    """q, k, v, decay, and the state."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, heads, length, width, generator=generator) for _ in "qk")
    v = torch.randn(batch, heads, length, columns, generator=generator)
    decay = torch.rand(heads, generator=generator) ** 0.1
    rows = states or batch
    S = torch.randn(rows, heads, width, columns, generator=generator)
    Z = torch.rand(rows, heads, width, generator=generator) + 0.5
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k, v))
    return q, k, v, decay.to(DEVICE), (S.to(DEVICE), Z.to(DEVICE))


def assert_matches(results, oracle, dtype=torch.float32):
    for name, result in results.items():
        tolerance = TOLERANCES[dtype]
        bound = tolerance.gradient if name.startswith("grad") else tolerance.output
        ratio, _ = measure(result, oracle[name])
        assert ratio <= bound, f"{name}: {ratio:.2e} above {bound:.2e}"


def check(arguments, backend, dtype=torch.float32):
    oracle = evaluate(fms_scan, arguments, dtype=torch.float64, backend="reference")
    with poisoned_memory():
        results = evaluate(fms_scan, arguments, backend=backend)
    assert_matches(results, oracle, dtype)


# --- Against the oracle ---------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "dtype", "sample"), sample_matrix(OPERATOR))
def test_matches_oracle(backend, dtype, sample):
    with poisoned_memory():
        errors = check_sample(OPERATOR, sample, backend=backend, device=DEVICE, dtype=dtype)
    assert [str(error) for error in errors if not error.passed] == []


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
def test_split_along_the_sequence(monkeypatch, backend, split, reverse, packed):
    monkeypatch.setattr(triton_impl, "SPLIT_PROGRAMS", 1 if split else 0)
    monkeypatch.setattr(triton_impl, "PART", 32)
    q, k, v, decay, state = inputs(1, 2, 110, states=6 if packed else 1)
    options = {"reverse": reverse, "initial_state": state, "return_final_state": True}
    if packed:
        options["cu_seqlens"] = torch.tensor(EMPTY_AROUND, device=DEVICE)
    check(((q, k, v, decay), options), backend)


def test_reference_is_the_closed_form():
    q, k, v, decay, _ = inputs(1, 1, 12, 3, 2, torch.float64)
    decay = decay.double()
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp())[0, 0] for x in (q, k))
    expected = torch.zeros_like(v[0, 0])
    for t in range(12):
        weights = [float(phi_q[t] @ phi_k[s]) * float(decay) ** (t - s) for s in range(t + 1)]
        expected[t] = sum(w * v[0, 0, s] for s, w in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(fms_scan(q, k, v, decay, backend="reference")[0, 0], expected)


@ON_BOTH
def test_decay_of_one_is_a_plain_sum_and_of_zero_only_the_token_itself(backend):
    q, k, v, _, _ = inputs(1, 1, 100)
    sums = (k.double().unsqueeze(-1) * v.double().unsqueeze(-2)).cumsum(2)
    expected = (q.double().unsqueeze(-2) @ sums).squeeze(-2)
    out = fms_scan(q, k, v, 1.0, scale=1.0, backend=backend, **LINEAR)
    assert measure(out, expected)[0] < 1e-5
    assert measure(fms_scan(q, k, v, 0.0, backend=backend), v.double())[0] < 1e-6
    log = fms_scan(q, k, v, -math.inf, log_decay=True, backend=backend)
    assert measure(log, v.double())[0] < 1e-6


@ON_BOTH
def test_gradient_of_a_zero_decay_is_the_recurrences_own(backend):
    one = torch.ones(1, 1, 3, 1, device=DEVICE)
    v = torch.tensor([2.0, 3.0, 5.0], device=DEVICE).view(1, 1, 3, 1)
    decay = torch.zeros(1, device=DEVICE, requires_grad=True)
    out = fms_scan(one, one, v, decay, backend=backend, **LINEAR)
    (gradient,) = torch.autograd.grad(out.sum(), decay)
    assert gradient.item() == pytest.approx(2.0 + 3.0)
    decay = torch.full((1,), -math.inf, device=DEVICE, requires_grad=True)
    out = fms_scan(one, one, v, decay, log_decay=True, backend=backend, **LINEAR)
    (gradient,) = torch.autograd.grad(out.sum(), decay)
    assert gradient.item() == 0.0


@ON_BOTH
def test_very_small_decays_are_finite(backend):
    q, k, v, _, _ = inputs(1, 3, 65)
    decay = torch.tensor([1e-30, 1e-38, 1e-42], device=DEVICE)
    check(((q, k, v, decay), {"normalize": False}), backend)
    leaf = decay.log().requires_grad_()
    out = fms_scan(q, k, v, leaf, log_decay=True, backend=backend)
    assert measure(out.detach(), v.double())[0] < 1e-5
    (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
    assert bool((gradient.abs() < 1e-25).all())


@ON_BOTH
def test_feature_map_keeps_what_elu_plus_one_would_round_away(backend):
    dtype = torch.float32 if INTERPRETING else torch.bfloat16
    k = torch.full((1, 1, 1, 1), -8.0, device=DEVICE, dtype=dtype)
    q, v = torch.zeros_like(k), torch.ones_like(k)
    out = fms_scan(q, k, v, 1.0, normalize=False, scale=1.0, backend=backend)
    assert out.item() == pytest.approx(math.exp(-8), rel=1e-2)


@ON_BOTH
def test_denominator_is_clamped_with_its_true_gradient(backend):
    q = torch.ones(1, 1, 2, 1, device=DEVICE)
    k = torch.tensor([0.25, 4.0], device=DEVICE).view(1, 1, 2, 1).requires_grad_()
    v = torch.full_like(q, 3.0)
    options = {"feature_map": "identity", "scale": 1.0, "eps": 0.5, "backend": backend}
    out = fms_scan(q, k, v, 0.0, **options)
    assert out.flatten().tolist() == pytest.approx([1.5, 3.0])
    (gradient,) = torch.autograd.grad(out.sum(), k)
    assert gradient.flatten().tolist() == pytest.approx([6.0, 0.0], abs=1e-5)


# --- Arguments ------------------------------------------------------------------------------


@ON_BOTH
def test_forms_of_the_decay(backend):
    q, k, v, decay, _ = inputs()
    expected = fms_scan(q, k, v, decay, backend=backend)
    for shape in ((1, 3, 1, 1), (3, 1), (1, 1, 3)):
        assert torch.equal(fms_scan(q, k, v, decay.view(shape), backend=backend), expected)
    log = fms_scan(q, k, v, decay.log(), log_decay=True, backend=backend)
    assert measure(log, expected)[0] < 1e-5
    same = fms_scan(q, k, v, 0.5, backend=backend)
    for value in (torch.tensor(0.5), torch.full((1, 1), 0.5), torch.full((3,), 0.5)):
        assert torch.equal(fms_scan(q, k, v, value.to(DEVICE), backend=backend), same)
    assert measure(fms_scan(q, k, v, 1, backend=backend), fms_scan(q, k, v, 1.0))[0] < 1e-5


@ON_BOTH
def test_scale_cancels_in_the_output_but_not_in_the_state(backend):
    q, k, v, decay, _ = inputs()
    out, (S, Z) = fms_scan(q, k, v, decay, return_final_state=True, backend=backend)
    other, (S2, Z2) = fms_scan(
        q, k, v, decay, scale=2 * 8**-0.5, return_final_state=True, backend=backend
    )
    assert measure(other, out)[0] < 1e-5
    assert measure(S2, 2 * S)[0] < 1e-5 and measure(Z2, 2 * Z)[0] < 1e-5


# --- States, packed sequences, steps --------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("options", [{}, LINEAR], ids=["normalised", "linear"])
def test_a_prefix_hands_its_state_to_the_rest(backend, reverse, options):
    q, k, v, decay, state = inputs(length=100)
    state = state if not options else state[0]
    options = {"reverse": reverse, "return_final_state": True, "backend": backend, **options}
    whole, last = fms_scan(q, k, v, decay, initial_state=state, **options)
    parts = [slice(0, 37), slice(37, 100)]
    outputs = {}
    for part in reversed(parts) if reverse else parts:
        outputs[part.start], state = fms_scan(
            q[:, :, part], k[:, :, part], v[:, :, part], decay, initial_state=state, **options
        )
    assert measure(torch.cat([outputs[0], outputs[37]], 2), whole)[0] < 1e-5
    for x, y in zip(state, last):
        assert measure(x, y)[0] < 1e-5


@ON_BOTH
def test_steps_continue_a_prefill(backend):
    q, k, v, decay, _ = inputs(length=70, dtype=torch.float16)
    options = {"return_final_state": True, "backend": backend}
    whole, last = fms_scan(q, k, v, decay, **options)
    _, state = fms_scan(q[:, :, :60], k[:, :, :60], v[:, :, :60], decay, **options)
    for t in range(60, 70):
        before = [x.clone() for x in state]
        out, new_state = fms_step(q[:, :, t], k[:, :, t], v[:, :, t], decay, state, backend=backend)
        assert all(map(torch.equal, state, before)), "a step must not change the state it is given"
        assert out.dtype == torch.float16 and new_state[0].dtype == torch.float32
        assert measure(out, whole[:, :, t])[0] < 1.5e-3
        state = new_state
    for x, y in zip(state, last):
        assert measure(x, y)[0] < 1e-3


@ON_BOTH
def test_step_without_a_state_and_its_gradients(backend):
    q, k, v, _, (S, _) = inputs(1, 1, 1, 2, 2)
    S.requires_grad_()
    out, _ = fms_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], 0.5, None, backend=backend)
    torch.testing.assert_close(out, v[:, :, 0])
    _, new = fms_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], 0.5, S, backend=backend, **LINEAR)
    (gradient,) = torch.autograd.grad(new.sum(), S)
    torch.testing.assert_close(gradient, torch.full_like(S, 0.5))


@ON_BOTH
@pytest.mark.parametrize("reverse", [False, True])
def test_each_packed_sequence_equals_itself_alone(backend, reverse):
    lengths = [0, 15, 0, 1, 64, 0, 48, 0]
    q, k, v, decay, (S, Z) = inputs(1, 2, sum(lengths), states=len(lengths))
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    options = {"reverse": reverse, "return_final_state": True, "backend": backend}
    out, (last_S, last_Z) = fms_scan(
        q, k, v, decay, initial_state=(S, Z), cu_seqlens=boundaries, **options
    )
    for i, parts in enumerate(zip(*(x.split(lengths, 2) for x in (q, k, v)))):
        alone, (S_i, Z_i) = fms_scan(
            *parts, decay, initial_state=(S[i : i + 1], Z[i : i + 1]), **options
        )
        span = slice(int(boundaries[i]), int(boundaries[i + 1]))
        assert measure(out[:, :, span], alone)[0] < 1e-5
        assert measure(last_S[i : i + 1], S_i)[0] < 1e-5
        assert measure(last_Z[i : i + 1], Z_i)[0] < 1e-5


@ON_BOTH
@pytest.mark.parametrize("of_decay", [False, True], ids=["fixed decay", "decay"])
def test_rows_past_the_last_boundary_are_zero(backend, of_decay):
    q, k, v, decay, _ = inputs(1, 2, 128)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    decay.requires_grad_(of_decay)
    boundaries = torch.tensor([0, 100], dtype=torch.int32, device=DEVICE)
    with poisoned_memory():
        out = fms_scan(q, k, v, decay, cu_seqlens=boundaries, backend=backend)
        weights = torch.arange(out.numel(), device=DEVICE).view(out.shape).sin()
        wanted = [*leaves, decay] if of_decay else leaves
        gradients = torch.autograd.grad((out * weights).sum(), wanted)
    for tensor in (out, *gradients[:3]):
        assert torch.equal(tensor[:, :, 100:], torch.zeros_like(tensor[:, :, 100:]))
        assert bool(tensor[:, :, 1:100].any())
    assert bool(gradients[-1].isfinite().all())


@ON_BOTH
def test_padding_is_left_out_by_giving_lengths(backend):
    q, k, v, decay, _ = inputs(1, 2, 8)
    options = {"return_final_state": True, "backend": backend}
    boundaries = torch.tensor([0, 3], device=DEVICE)
    _, state = fms_scan(q, k, v, decay, cu_seqlens=boundaries, **options)
    _, alone = fms_scan(q[:, :, :3], k[:, :, :3], v[:, :, :3], decay, **options)
    for x, y in zip(state, alone):
        assert measure(x, y)[0] < 1e-6


@pytest.mark.skipif(INTERPRETING, reason="2050 documents take minutes in the interpreter")
def test_many_short_documents():
    q, k, v, decay, _ = inputs(1, 2, 2050 * 16)
    boundaries = torch.arange(0, 2051 * 16, 16, device=DEVICE)
    out = fms_scan(q, k, v, decay, cu_seqlens=boundaries)

    def documents(x):
        return x[0].unflatten(1, (2050, 16)).transpose(0, 1)

    alone = fms_scan(documents(q), documents(k), documents(v), decay)
    assert measure(documents(out), alone)[0] < 1e-5


@ON_BOTH
def test_gradient_of_the_final_state_alone(backend):
    q, k, v, decay, state = inputs(length=9)
    results = []
    for on in (backend, "reference"):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, decay, *state)]
        _, last = fms_scan(
            *leaves[:4], initial_state=tuple(leaves[4:]), return_final_state=True, backend=on
        )
        loss = last[0].sum() + last[1].square().sum()
        results.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for actual, expected in zip(*results):
        expected = torch.zeros_like(state[0][:1]) if expected is None else expected
        if actual is None or not bool(expected.any()):
            assert actual is None or not bool(actual.any())
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@ON_BOTH
def test_empty_sequences_batches_and_channels(backend):
    for batch, length, width, columns in ((2, 0, 3, 4), (0, 5, 3, 4), (2, 5, 0, 4), (2, 5, 3, 0)):
        q, k, v, decay, state = inputs(batch, 2, length, width, columns)
        state = tuple(x[:batch].requires_grad_() for x in state)
        out, last = fms_scan(
            q.requires_grad_(), k, v, decay, initial_state=state, return_final_state=True,
            backend=backend,
        )  # fmt: skip
        assert out.shape == v.shape and last[0].shape == state[0].shape
        torch.autograd.grad(out.sum() + last[0].sum() + last[1].sum(), (q, *state))
        if length == 0:
            assert torch.equal(last[0], state[0]) and torch.equal(last[1], state[1])


# --- Strides, dtypes, determinism -----------------------------------------------------------


@ON_BOTH
@pytest.mark.parametrize("gradient", ["stride 0", "transposed", "sliced"])
def test_strides_of_inputs_and_gradients(backend, gradient):
    q, k, v, decay, _ = inputs(2, 2, 40, 6, 6)

    def length_first(x):
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    fused = torch.cat((q, k, v), 3).transpose(1, 2).contiguous().transpose(1, 2)
    layouts = {
        "contiguous": (q, k, v),
        "heads inside": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
        "length first": tuple(map(length_first, (q, k, v))),
        "columns first": tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)),
        "expanded": tuple(x[:1, :1].expand(2, 2, -1, -1) for x in (q, k, v)),
        "fused": fused.split(6, 3),
        "every other": tuple(x.repeat(1, 1, 1, 2)[..., ::2] for x in (q, k, v)),
    }
    grads = {
        "stride 0": torch.ones((), device=DEVICE).expand(2, 2, 40, 6),
        "transposed": torch.randn(6, 40, 2, 2, device=DEVICE).permute(2, 3, 1, 0),
        "sliced": torch.randn(2, 2, 80, 12, device=DEVICE)[:, :, ::2, 3:9],
    }
    for name, layout in layouts.items():
        results = []
        for dtype, on in ((torch.float32, backend), (torch.float64, "reference")):
            leaves = [x.detach().to(dtype).requires_grad_() for x in layout]
            out = fms_scan(*leaves, decay.to(dtype), backend=on)
            results.append((out, *torch.autograd.grad(out, leaves, grads[gradient].to(dtype))))
        assert results[0][0].is_contiguous()
        for actual, expected in zip(*results):
            assert measure(actual.detach(), expected.detach())[0] < 2e-5, name


@ON_BOTH
def test_mixed_dtypes_and_their_gradients(backend):
    q, k, v, decay, (S, Z) = inputs(dtype=torch.float16)
    k = k.float()
    S = S.bfloat16()
    leaves = [x.requires_grad_() for x in (q, k, v, decay, S, Z)]
    out, last = fms_scan(
        q, k, v, decay, initial_state=(S, Z), return_final_state=True, backend=backend
    )
    assert out.dtype == torch.float16 and last[0].dtype == last[1].dtype == torch.float32
    gradients = torch.autograd.grad(out.float().sum() + last[0].sum() + last[1].sum(), leaves)
    assert [g.dtype for g in gradients] == [x.dtype for x in leaves]


def test_float64_is_computed_in_float64():
    q, k, v, decay, _ = inputs(dtype=torch.float64)
    out, (S, Z) = fms_scan(q, k, v, decay, return_final_state=True)
    assert out.dtype == S.dtype == Z.dtype == torch.float64
    assert measure(out, fms_scan(q, k, v, decay, backend="reference"))[0] < 1e-14


@ON_BOTH
def test_autocast(backend):
    q, k, v, decay, _ = inputs()
    expected = fms_scan(q, k, v, decay, backend=backend)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(fms_scan(q, k, v, decay, backend=backend), expected)
        if not INTERPRETING:
            projected = v @ torch.eye(v.shape[3], device=DEVICE)
            assert fms_scan(q, k, projected, decay, backend=backend).dtype == torch.bfloat16


@ON_BOTH
@pytest.mark.parametrize("of_decay", [False, True], ids=["fixed decay", "decay"])
def test_same_bits_every_time(backend, of_decay):
    length = 130 if INTERPRETING else 3000
    q, k, v, decay, state = inputs(1, 2, length, 19, 24)
    arguments = (
        (q, k, v, decay),
        {"initial_state": state, "return_final_state": True},
    )
    constants = () if of_decay else ("decay",)
    first = evaluate(fms_scan, arguments, constants=constants, backend=backend)
    for _ in range(1 if INTERPRETING else 10):
        again = evaluate(fms_scan, arguments, constants=constants, backend=backend)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device and 13 GiB of its memory")
def test_offsets_past_int32():
    memory = torch.empty(2, 2**20, 3072, dtype=torch.bfloat16, device=DEVICE)
    length = 300
    rows = memory[:, -length:, -1536:].normal_().unflatten(2, (24, 64)).transpose(1, 2)
    q, k, v = rows.split(8, 1)
    decay = torch.full((8,), 0.97, device=DEVICE)
    constants = ("decay",)
    arguments = ((q, k, v, decay), {})
    oracle = evaluate(
        fms_scan, arguments, dtype=torch.float64, constants=constants, backend="reference"
    )
    results = evaluate(fms_scan, arguments, constants=constants, backend="triton")
    assert_matches(results, oracle, torch.bfloat16)


@pytest.mark.skipif(INTERPRETING, reason="large grids take minutes in the interpreter")
def test_large_grids():
    q, k, v, _, _ = inputs(4100, 16, 16, 4, 4)
    out = fms_scan(q, k, v, 0.9)
    assert measure(out, fms_scan(q, k, v, 0.9, backend="reference"))[0] < 1e-5


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(0, 200),
    width=st.integers(1, 20),
    columns=st.integers(1, 20),
    feature_map=st.sampled_from(["elu+1", "relu", "identity"]),
    normalize=st.booleans(),
    reverse=st.booleans(),
    log_decay=st.booleans(),
    cuts=st.none() | st.lists(st.integers(0, 200), max_size=5),
    seed=st.integers(0, 2**31),
)
def test_torch_equals_the_reference_on_any_input(
    length, width, columns, feature_map, normalize, reverse, log_decay, cuts, seed
):
    q, k, v, decay, _ = inputs(1, 2, length, width, columns, torch.float64, seed)
    if feature_map == "identity":
        q, k = q.abs(), k.abs()
    decay = decay.double()
    options = {
        "feature_map": feature_map, "normalize": normalize, "reverse": reverse,
        "log_decay": log_decay, "return_final_state": True, "eps": 1e-2,
    }  # fmt: skip
    if cuts is not None:
        cuts = sorted(min(cut, length) for cut in cuts)
        options["cu_seqlens"] = torch.tensor([0, *cuts], device=DEVICE)
    arguments = ((q, k, v, decay.log() if log_decay else decay), options)
    expected = evaluate(fms_scan, arguments, backend="reference")
    actual = evaluate(fms_scan, arguments, backend="torch")
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-10)


# --- Derivatives ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reverse": True, "log_decay": True},
        {**LINEAR, "zero": True},
        {"feature_map": "relu", "cu_seqlens": [0, 3, 3, 7, 8], "reverse": True},
    ],
    ids=str,
)
def test_first_and_second_derivatives(backend, options):
    options = dict(options)
    boundaries = options.pop("cu_seqlens", None)
    if boundaries is not None:
        options["cu_seqlens"] = torch.tensor(boundaries, device=DEVICE)
    q, k, v, decay, (S, Z) = inputs(1, 2, 9, 2, 2, torch.float64, states=4 if boundaries else 1)
    if options.pop("zero", False):
        decay[0] = 0.0
    if options.get("log_decay"):
        decay = decay.log()
    normalize = options.get("normalize", True)
    leaves = [x.double().requires_grad_() for x in (q, k, v, decay, S, Z)[: 6 if normalize else 5]]

    def run(q, k, v, decay, S, *Z):
        out, last = fms_scan(
            q, k, v, decay, initial_state=(S, *Z) if Z else S, return_final_state=True,
            backend=backend, **options,
        )  # fmt: skip
        return (out, *last) if Z else (out, last)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_second_derivative_of_a_fused_kernel_raises(backend):
    q, k, v, decay, _ = inputs(1, 1, 8, 2, 2)
    q.requires_grad_()

    def loss(q):
        return fms_scan(q, k, v, decay, backend=backend).square().sum()

    (gradient,) = torch.autograd.grad(loss(q), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="backend='torch'"):
        torch.autograd.grad(gradient.sum(), q)


@ON_BOTH
def test_functional_transforms(backend):
    q, _, v, decay, _ = inputs(3, 2, 9, 4, 4)

    def loss(q, v):
        return fms_scan(q[None], q[None], v[None], decay, backend=backend).square().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(q, v)
    leaves = q.clone().requires_grad_(), v.clone().requires_grad_()
    total = fms_scan(leaves[0], leaves[0], leaves[1], decay, backend=backend).square().sum()
    for actual, expected in zip(each, torch.autograd.grad(total, leaves)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@ON_BOTH
def test_only_the_gradients_asked_for(backend):
    q, k, v, decay, _ = inputs()
    v.requires_grad_()
    out = fms_scan(q, k, v, decay, backend=backend)
    out.sum().backward()
    assert v.grad is not None and q.grad is None and decay.grad is None
    assert not fms_scan(q, k, v.detach(), decay, backend=backend).requires_grad
    with torch.no_grad():
        assert not fms_scan(q, k, v, decay, backend=backend).requires_grad


# --- Registration and compilation -----------------------------------------------------------


@ON_BOTH
def test_opcheck(backend):
    checked = set()
    for sample in samples(OPERATOR, backend):
        if sample.label in ("one token", "packed"):
            arguments = make_sample(sample, DEVICE, torch.float32)
            checked |= set(opcheck_calls(partial(evaluate, fms_scan, arguments, backend=backend)))
    names = {"torch": {"torch", "torch_bwd"}, "triton": {"fwd", "bwd"}}[backend]
    assert checked == {f"neuralops_ssm::scalar_decay_{name}" for name in names}


@ON_BOTH
def test_compiles_to_one_graph_for_every_length(backend):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, decay):
        out, last = fms_scan(q, k, v, decay, return_final_state=True, backend=backend)
        return out * 2, last[0]

    compiled = torch.compile(step, backend=count, fullgraph=True)
    for length in (64, 65, 100, 7, 128):
        leaves = [x.requires_grad_() for x in inputs(length=length)[:3]]
        decay = inputs()[3]
        out, last = compiled(*leaves, decay)
        gradients = torch.autograd.grad(out.sum() + last.sum(), leaves)
        expected_out, expected_last = step(*leaves, decay)
        expected = torch.autograd.grad(expected_out.sum() + expected_last.sum(), leaves)
        for actual, value in zip((out, last, *gradients), (expected_out, expected_last, *expected)):
            torch.testing.assert_close(actual, value)
    assert len(graphs) <= 2


@ON_BOTH
def test_compiles_with_autograd_and_packed_sequences(backend):
    boundaries = torch.tensor([0, 10, 40], device=DEVICE)

    def loss(q, k, v, decay):
        return fms_scan(q, k, v, decay, cu_seqlens=boundaries, backend=backend).square().sum()

    leaves = [x.requires_grad_() for x in inputs(1, 2, 40)[:4]]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(*leaves), leaves)
    for gradient, expected in zip(actual, torch.autograd.grad(loss(*leaves), leaves)):
        torch.testing.assert_close(gradient, expected)


def test_exports():
    class Mixer(torch.nn.Module):
        def forward(self, q, k, v):
            return fms_scan(q, k, v, 0.9)

    dims = {2: torch.export.Dim("length", min=2, max=4096)}
    program = torch.export.export(Mixer(), inputs()[:3], dynamic_shapes=(dims, dims, dims))
    others = inputs(length=33)[:3]
    torch.testing.assert_close(program.module()(*others), Mixer()(*others))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a CUDA device")
def test_cuda_graph_of_a_step():
    q, k, v, decay, state = inputs(length=1)
    q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    fms_step(q, k, v, decay, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, new_state = fms_step(q, k, v, decay, state)
    q.normal_(), k.normal_(), v.normal_()
    graph.replay()
    expected_out, expected_state = fms_step(q, k, v, decay, state)
    assert torch.equal(out, expected_out) and torch.equal(new_state[0], expected_state[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="compilations are counted on a CUDA device")
def test_a_new_batch_or_length_compiles_nothing():
    from neuralops.ssm.scalar_decay import backward_kernels, kernels

    def run(batch, length):
        q, k, v, decay, _ = inputs(batch, 2, length, 64, 64, torch.bfloat16)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        fms_scan(*leaves, decay).sum().backward()

    def compiled():
        used = (
            kernels.forward_parts_kernel, kernels.forward_kernel,
            backward_kernels.denominator_kernel, backward_kernels.backward_parts_kernel,
            backward_kernels.backward_kernel,
        )  # fmt: skip
        device = torch.cuda.current_device()
        return sum(len(kernel.device_caches[device][0]) for kernel in used)

    run(2, 100), run(300, 100)
    before = compiled()
    for batch, length in ((1, 1), (3, 17), (5, 128), (7, 4096), (301, 33)):
        run(batch, length)
    assert compiled() == before


@pytest.mark.skipif(DEVICE == "cpu", reason="synchronisations are a CUDA device's")
def test_packed_sequences_do_not_wait_for_the_device():
    q, k, v, decay, _ = inputs(1, 2, 100)
    boundaries = torch.tensor([0, 10, 90], device=DEVICE)
    fms_scan(q, k, v, decay, cu_seqlens=boundaries)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for backend in ("triton", "torch"):
            fms_scan(q, k, v, decay, cu_seqlens=boundaries, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- What can go wrong ----------------------------------------------------------------------


def good(**changes):
    q, k, v, decay, _ = inputs(2, 3, 6, 4, 5)
    return {"q": q, "k": k, "v": v, "decay": decay, **changes}


def ones(*shape):
    return torch.ones(shape, device=DEVICE)


WRONG = {
    "q is a list": ({"q": [1.0]}, TypeError, r"q must be a tensor \(B, H, L, Dk\), got list"),
    "sparse k": ({"k": ones(2, 3, 6, 4).to_sparse()}, TypeError, "k must be a dense tensor"),
    "integer v": ({"v": ones(2, 3, 6, 5).int()}, TypeError, "v must be float16.*int32"),
    "q of rank 3": ({"q": ones(3, 6, 4)}, ValueError, r"q must have shape \(B, H, L, Dk\)"),
    "k's width": ({"k": ones(2, 3, 6, 5)}, ValueError, r"k must have shape .* like q"),
    "v's length": ({"v": ones(2, 3, 7, 5)}, ValueError, r"v must have shape .* like q"),
    "device": ({"k": torch.ones(2, 3, 6, 4, device="meta")}, ValueError, "k must be on"),
    "decay's shape": ({"decay": ones(2)}, ValueError, r"squeezes to \(H,\) = \(3,\)"),
    "decay of tokens": ({"decay": ones(3, 3)}, ValueError, r"squeezes to \(H,\) = \(3,\)"),
    "decay above 1": ({"decay": 1.5}, ValueError, r"decay must be in \[0, 1\], got 1.5"),
    "negative decay": ({"decay": -0.5}, ValueError, r"decay must be in \[0, 1\], got -0.5"),
    "log above 0": ({"decay": 0.5, "log_decay": True}, ValueError, "a logarithm, at most 0"),
    "decay is a string": ({"decay": "0.5"}, TypeError, "decay must be a Python number"),
    "integer decay": ({"decay": ones(3).int()}, TypeError, "decay must be float16"),
    "feature map": ({"feature_map": "elu"}, ValueError, "must be one of elu\\+1, relu, identity"),
    "no feature map": ({"feature_map": None}, ValueError, "feature_map must be one of"),
    "scale": ({"scale": "1"}, TypeError, "scale must be a Python number"),
    "scale is nan": ({"scale": math.nan}, ValueError, "scale.*nan"),
    "eps": ({"eps": None}, TypeError, "eps must be a Python number"),
    "normalize": ({"normalize": 1}, TypeError, "normalize must be True or False"),
    "reverse": ({"reverse": None}, TypeError, "reverse must be True or False"),
    "log_decay": ({"log_decay": 0}, TypeError, "log_decay must be True or False"),
    "return_final_state": ({"return_final_state": "yes"}, TypeError, "return_final_state"),
    "state alone": ({"initial_state": ones(2, 3, 4, 5)}, TypeError, r"the tuple \(S, Z\)"),
    "tuple of three": ({"initial_state": (ones(1),) * 3}, TypeError, r"the tuple \(S, Z\)"),
    "tuple": (
        {"initial_state": (ones(2, 3, 4, 5), ones(2, 3, 4)), "normalize": False},
        TypeError,
        "there is no key sum without the normaliser",
    ),
    "state's shape": (
        {"initial_state": (ones(2, 3, 5, 4), ones(2, 3, 4))},
        ValueError,
        r"S of initial_state must have shape \(B, H, Dk, Dv\) = \(2, 3, 4, 5\)",
    ),
    "key sum's shape": (
        {"initial_state": (ones(2, 3, 4, 5), ones(2, 3, 5))},
        ValueError,
        r"Z of initial_state must have shape \(B, H, Dk\) = \(2, 3, 4\)",
    ),
    "cu_seqlens and B 2": (
        {"cu_seqlens": torch.tensor([0, 6], device=DEVICE)},
        ValueError,
        "batch size must be 1, got 2",
    ),
    "cu_seqlens is a list": ({"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens must be an int32"),
    "unknown backend": ({"backend": "cuda"}, ValueError, "backend must be one of triton, torch"),
    "unknown keyword": ({"revers": True}, TypeError, "revers"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_wrong_arguments(case, backend):
    changes, error, message = case
    with pytest.raises(error, match=message):
        fms_scan(**{"backend": backend, **good(**changes)})


def test_wrong_arguments_of_a_step():
    q, k, v, decay, _ = inputs(1, 1, 1)
    with pytest.raises(ValueError, match=r"fms_step: q must have shape \(B, H, Dk\)"):
        fms_step(q, k, v, decay, None)
    with pytest.raises(ValueError, match=r"fms_step: k must have shape \(B, H, Dk\) like q"):
        fms_step(q[:, :, 0], k[:, :, 0, :3], v[:, :, 0], decay, None)
    with pytest.raises(TypeError, match=r"the tuple \(S, Z\)"):
        fms_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], decay, torch.ones(1))


def test_widths_the_kernels_do_not_hold_run_on_torch():
    q, k, v, decay, _ = inputs(1, 1, 3, 257, 300)
    explanation = neuralops.core.explain(fms_scan, q, k, v, decay)
    assert explanation.backend == "torch"
    assert any("Dk = 257 is above 256" in reason for reason in explanation.reasons["triton"])
    assert any("Dv = 300 is above 256" in reason for reason in explanation.reasons["triton"])
    expected = fms_scan(q, k, v, decay, backend="reference")
    assert measure(fms_scan(q, k, v, decay), expected)[0] < 1e-5


def test_calls_can_be_copied_and_do_not_import_triton():
    copy.deepcopy(OPERATOR)
    code = (
        "import sys, torch; from neuralops.ssm import fms_scan; x = torch.ones(1, 1, 2, 2);"
        "fms_scan(x, x, x, 0.5, backend='torch'); assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
