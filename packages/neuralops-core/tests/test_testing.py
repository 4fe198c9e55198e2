"""The tools that judge every operator have to notice what they are for."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from neuralops.core.library import OperatorLibrary, backward_function, on_its_device
from neuralops.core.testing import (
    TOLERANCES,
    compare,
    evaluate,
    measure,
    opcheck_calls,
    poisoned_memory,
)


def test_measure():
    reference = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert measure(reference, reference) == (0.0, 0.0)
    rms, largest = measure(torch.tensor([3.0, 5.0]), reference)
    assert rms == pytest.approx(1 / 5) and largest == pytest.approx(1 / 4)
    assert measure(torch.zeros(3), torch.zeros(3)) == (0.0, 0.0)
    assert measure(torch.empty(0), torch.empty(0)) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_measure_of_values_that_are_not_finite(bad):
    assert measure(torch.tensor([1.0, bad]), torch.ones(2)) == (math.inf, math.inf)
    assert not compare("output", torch.tensor([1.0, bad]), torch.ones(2), 1e9).passed


def test_anything_but_zero_is_wrong_where_zero_is_right():
    assert measure(torch.tensor([0.0, 1e-30]), torch.zeros(2))[0] == math.inf


def test_measure_of_other_shapes():
    with pytest.raises(ValueError, match="shapes differ"):
        measure(torch.ones(2), torch.ones(1, 2))


def test_one_element_far_off_is_noticed():
    reference = torch.ones(10**6, dtype=torch.float64)
    actual = reference.clone()
    actual[0] += 1e-3
    assert measure(actual, reference)[0] < TOLERANCES[torch.float32].output
    assert not compare("output", actual, reference, 1e-5).passed


def test_complex_values():
    reference = torch.tensor([3 + 4j], dtype=torch.complex128)
    assert measure(torch.tensor([3 + 3j]), reference) == (pytest.approx(0.2), pytest.approx(0.2))


def test_poisoned_memory():
    with poisoned_memory():
        assert bool(torch.empty(100).isnan().all())
        assert bool(torch.ones(3).new_empty(5).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_evaluate_names_outputs_and_gradients():
    def function(x, y=None, *, n=2, return_state=True):
        out = n * x + y * y
        return (out, out.sum()) if return_state else out

    x, y = torch.ones(3), torch.full((3,), 2.0)
    results = evaluate(function, ((x, y), {"n": 3}), dtype=torch.float64)
    assert list(results) == ["output", "final_state", "grad x", "grad y"]
    assert results["output"].tolist() == [7.0, 7.0, 7.0]
    assert torch.equal(results["grad x"] * 4, results["grad y"] * 3)
    constant = evaluate(function, ((x, y), {}), constants=("y",), return_state=False)
    assert list(constant) == ["output", "grad x"]
    assert not x.requires_grad


def _double(x):
    return 2 * x


def _register(library, name, fake):
    return library.register(f"{name}(Tensor x) -> Tensor", _double, fake)


def test_opcheck_finds_a_wrong_fake():
    library = OperatorLibrary("neuralops_test")
    good = _register(library, "good", torch.empty_like)
    bad = _register(library, "bad", lambda x: x.new_empty((x.shape[0] + 1, *x.shape[1:])))
    assert opcheck_calls(lambda: good(torch.ones(2, 3))) == ["neuralops_test::good"]
    with pytest.raises(torch.testing._internal.optests.OpCheckError):
        opcheck_calls(lambda: bad(torch.ones(2, 3)))


def test_a_launcher_runs_on_its_tensors_gpu(monkeypatch):
    current = [0]

    @contextmanager
    def switch(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", switch)
    launch = on_its_device(lambda x, y: (current[0], y))
    for index in (0, 1):
        tensor = SimpleNamespace(device=torch.device("cuda", index))
        assert launch(tensor, 3) == (index, 3)
        assert current == [0]
    assert launch(torch.ones(1), 3) == (0, 3)


def test_a_fused_backward_is_not_differentiated_silently():
    apply = backward_function("toy_scan", _double, lambda x: x)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"toy_scan.*differentiable once"):
        apply(x).sum().backward()
    with pytest.raises(NotImplementedError, match="toy_scan"):
        torch.func.grad(lambda x: apply(x).sum())(torch.ones(2))
