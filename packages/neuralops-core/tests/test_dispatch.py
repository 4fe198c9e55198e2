"""Which implementation runs, and what is said of it."""

import logging
import sys
import threading
import types
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

import neuralops.core
from neuralops.core import (
    BackendUnavailableError,
    Implementation,
    Operator,
    explain,
    get_operator,
    operators,
    use_backend,
)
from neuralops.core import logging as core_logging
from neuralops.core.dispatch import dispatch
from neuralops.core.registry import DISTRIBUTIONS


class OutOfResources(Exception):
    """Stands for Triton's."""


def fails(x):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def too_long(x):
    return ["length 9 is above this kernel's limit of 8", "a second reason"] if len(x) > 8 else []


@pytest.fixture
def operator(request):
    run = getattr(request, "param", lambda x: ("triton", x))
    core_logging.forget_logged()
    yield Operator(
        name="toy_scan",
        family="toy",
        function="toy:toy_scan",
        implementations=(
            Implementation("triton", run, too_long),
            Implementation("torch", lambda x: ("torch", x)),
            Implementation("reference", lambda x: ("reference", x), automatic=False),
        ),
    )
    core_logging.forget_logged()


SHORT, LONG = torch.zeros(8), torch.zeros(9)


def test_a_provisional_backend_runs_only_when_asked_for():
    core_logging.forget_logged()
    kernels = Implementation("triton", lambda x: "triton", too_long, provisional="not yet tried")
    torch_form = Implementation("torch", lambda x: "torch")
    operator = Operator("toy", "toy", "toy:toy", (kernels, torch_form))
    assert dispatch(operator, None, SHORT) == "torch"
    assert dispatch(operator, "triton", SHORT) == "triton"
    with pytest.raises(BackendUnavailableError, match="length 9"):
        dispatch(operator, "triton", LONG)
    assert kernels.reasons(SHORT) == ("not yet tried",)
    assert kernels.reasons(LONG) == too_long(LONG)


def test_the_first_suitable_backend_runs(operator):
    assert dispatch(operator, None, SHORT)[0] == "triton"
    assert dispatch(operator, None, LONG)[0] == "torch"


@pytest.mark.parametrize("backend", ["torch", "reference", "triton"])
def test_a_request_is_followed(operator, backend, monkeypatch):
    assert dispatch(operator, backend, SHORT)[0] == backend
    with use_backend(backend):
        assert dispatch(operator, None, SHORT)[0] == backend
    monkeypatch.setenv("NEURALOPS_BACKEND", backend)
    assert dispatch(operator, None, SHORT)[0] == backend
    with use_backend(None):
        assert dispatch(operator, None, LONG)[0] == "torch"


def test_the_argument_comes_before_the_block_before_the_environment(operator, monkeypatch):
    monkeypatch.setenv("NEURALOPS_BACKEND", "reference")
    with use_backend("torch"):
        assert dispatch(operator, None, SHORT)[0] == "torch"
        assert dispatch(operator, "triton", SHORT)[0] == "triton"
        with use_backend("triton"):
            assert dispatch(operator, None, SHORT)[0] == "triton"
        assert dispatch(operator, None, SHORT)[0] == "torch"
    assert dispatch(operator, None, SHORT)[0] == "reference"


def test_a_block_is_left_on_an_error_and_belongs_to_its_thread(operator):
    seen = []
    with pytest.raises(KeyError), use_backend("torch"):
        thread = threading.Thread(target=lambda: seen.append(dispatch(operator, None, SHORT)[0]))
        thread.start()
        thread.join()
        raise KeyError
    assert seen == ["triton"]
    assert dispatch(operator, None, SHORT)[0] == "triton"


def test_a_request_never_falls_back_and_gives_every_reason(operator):
    with pytest.raises(BackendUnavailableError) as error:
        dispatch(operator, "triton", LONG)
    for part in ("toy_scan", "'triton'", "limit of 8", "a second reason"):
        assert part in str(error.value)


@pytest.mark.parametrize("backend", ["cuda", "Triton", "", 3])
def test_an_unknown_backend(operator, backend):
    with pytest.raises(ValueError, match="toy_scan: backend must be one of triton, torch, refer"):
        dispatch(operator, backend, SHORT)
    with pytest.raises(ValueError, match="use_backend: backend must be one of"):
        use_backend(backend)


def test_an_unknown_backend_in_the_environment(operator, monkeypatch):
    monkeypatch.setenv("NEURALOPS_BACKEND", "cuda")
    with pytest.raises(ValueError, match="NEURALOPS_BACKEND: backend must be one of"):
        dispatch(operator, None, SHORT)


def test_a_fallback_is_logged_once_on_the_operators_logger(operator, caplog):
    with caplog.at_level(logging.INFO, logger="neuralops"):
        for _ in range(3):
            dispatch(operator, None, LONG)
    (record,) = caplog.records
    assert record.name == "neuralops.toy.toy_scan"
    assert record.levelno == logging.INFO
    assert "limit of 8" in record.message and "a second reason" in record.message


def test_a_fallback_of_a_gpu_tensor_is_a_warning(operator, caplog):
    tensor = types.SimpleNamespace(is_cuda=True)
    core_logging.log_fallback(operator, "torch", ["no"], [SHORT])
    with caplog.at_level(logging.INFO, logger="neuralops"):
        fake = torch.zeros(1)
        fake.__class__ = type("CudaTensor", (torch.Tensor,), {"is_cuda": tensor.is_cuda})
        core_logging.log_fallback(operator, "torch", ["no"], [fake])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_nothing_is_logged_when_the_fast_path_runs(operator, caplog):
    with caplog.at_level(logging.DEBUG, logger="neuralops"):
        dispatch(operator, None, SHORT)
    assert not caplog.records
    assert not logging.getLogger("neuralops").handlers


@pytest.mark.parametrize("operator", [fails], indirect=True)
def test_errors_of_a_kernel_propagate(operator):
    with pytest.raises(RuntimeError, match="illegal memory access"):
        dispatch(operator, None, SHORT)


def out_of_resources(x):
    raise sys.modules["triton.runtime.errors"].OutOfResources


@pytest.mark.parametrize("operator", [out_of_resources], indirect=True)
def test_a_kernels_resource_failure_falls_back_unless_it_was_requested(
    operator, monkeypatch, caplog
):
    names = {"triton.compiler.errors": ["CompilationError"]}
    names["triton.runtime.errors"] = ["OutOfResources", "PTXASError"]
    for name in ("triton", "triton.compiler", "triton.runtime", *names):
        module = types.ModuleType(name)
        for attribute in names.get(name, ()):
            setattr(module, attribute, type(attribute, (Exception,), {}))
        monkeypatch.setitem(sys.modules, name, module)
    with caplog.at_level(logging.INFO, logger="neuralops"):
        assert dispatch(operator, None, SHORT)[0] == "torch"
    assert "OutOfResources" in caplog.text
    with pytest.raises(sys.modules["triton.runtime.errors"].OutOfResources):
        dispatch(operator, "triton", SHORT)


def test_no_backend_left():
    operator = Operator("toy", "toy", "toy:toy", (Implementation("triton", fails, too_long),))
    with pytest.raises(BackendUnavailableError, match=r"no backend can serve.*limit of 8"):
        dispatch(operator, None, LONG)
    with pytest.raises(ValueError, match="must be one of triton, got 'torch'"):
        dispatch(operator, "torch", SHORT)


def test_explain_tells_and_does_not_run(operator):
    def function(x, backend=None):
        return dispatch(operator, backend, x)

    explanation = explain(function, LONG)
    assert explanation.backend == "torch" and explanation.requested is None
    assert explanation.reasons["triton"] == tuple(too_long(LONG))
    assert "toy_scan runs on torch" in str(explanation)
    assert "not on triton: a second reason" in str(explanation)
    assert explain(function, SHORT).backend == "triton"
    assert explain(function, LONG, backend="triton").backend is None
    with use_backend("reference"):
        assert explain(function, SHORT).requested == "reference"
    assert function(SHORT)[0] == "triton", "explaining has ended"


def test_explain_of_something_else():
    with pytest.raises(TypeError, match="op must be a NeuralOps operator"):
        explain(len, [])
    with pytest.raises(TypeError, match="got Tensor; the call's arguments come after it"):
        explain(SHORT)
    with pytest.raises(ValueError, match="unknown operator 'nothing'"):
        explain("nothing")
    with pytest.raises(ZeroDivisionError):
        explain(lambda: 1 / 0)


def test_an_operator_of_a_family_that_is_not_installed():
    for name in sorted(set(DISTRIBUTIONS) - set(operators())):
        try:
            found = version(DISTRIBUTIONS[name])
        except PackageNotFoundError:
            message = f"{name}' is not installed: pip install {DISTRIBUTIONS[name]}"
        else:
            message = f"{name}' is not in the installed {DISTRIBUTIONS[name]} {found}; a later"
        with pytest.raises(ValueError, match=message):
            get_operator(name)


def test_implementation_backends_are_checked():
    with pytest.raises(ValueError, match="backend must be one of"):
        Implementation("cuda", fails)


def test_version():
    assert neuralops.core.__version__ == version("neuralops-core")
