"""Registers the low-level operators behind the public functions with ``torch.library``.

An operator is known to PyTorch by a schema, a launcher and a fake that gives its outputs'
shapes; the launcher imports its kernels when it first runs. Its derivative is a
``torch.autograd.Function`` around it, see :func:`backward_function`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


class OperatorLibrary:
    """The registered operators of one family.

    Args:
        namespace: the name below ``torch.ops``, such as ``"neuralops_ssm"``.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._library = torch.library.Library(namespace, "FRAGMENT")

    def register(
        self, schema: str, launcher: Callable[..., Any], fake: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Register an operator and return it.

        Args:
            schema: such as ``"hgrn2_scan_fwd(Tensor f, Tensor iv) -> Tensor"``.
            launcher: computes it, on any device. Its first argument is a tensor, whose device
                is the current one while it runs.
            fake: returns empty outputs of the right shape, dtype and strides.
        """
        name = schema.partition("(")[0]
        self._library.define(schema)
        self._library.impl(name, on_its_device(launcher), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self.namespace}::{name}", fake, lib=self._library)
        operator: Callable[..., Any] = getattr(getattr(torch.ops, self.namespace), name).default
        return operator


def on_its_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Make the first argument's GPU the current one, since Triton launches on that one."""

    def launch(first: torch.Tensor, *others: Any) -> Any:
        device = first.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return launcher(first, *others)
        with torch.cuda.device(device):
            return launcher(first, *others)

    return launch


class _Positional(inspect.Signature):
    """A signature that takes the arguments as they come, all of them and by position."""

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return _Bound(args) if args and not kwargs else super().bind(*args, **kwargs)


class _Bound:
    """What `inspect.Signature.bind` returns, where nothing is left to a default."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.kwargs: dict[str, Any] = {}

    def apply_defaults(self) -> None:
        pass


def signed(function: _Function) -> _Function:
    """Keep the signature of an autograd Function's ``forward``, which ``apply`` binds each time.

    Here ``apply`` is always given all the arguments by position, so that nothing is to be bound:
    finding and binding the signature would take half of the time of ``apply``.
    """
    parameters = list(inspect.signature(function).parameters.values())
    function.__signature__ = _Positional(parameters)  # type: ignore[attr-defined]
    return function


def backward_function(
    operator: str, call: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a fused backward so that differentiating it raises instead of giving zeros.

    Args:
        operator: the public name, for the message.
        call: the fused backward: tensors and options in, gradients out.
        fake: its fake, for the names of its arguments.
    """

    def forward(*inputs: Any) -> Any:
        return call(*inputs)

    parameters = list(inspect.signature(fake).parameters.values())
    forward.__signature__ = _Positional(parameters)  # type: ignore[attr-defined]

    class FusedBackward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise NotImplementedError(
                f"{operator}: the Triton backend is differentiable once; "
                "use backend='torch' for gradients of gradients"
            )

    FusedBackward.forward = staticmethod(forward)  # type: ignore[method-assign]
    apply: Callable[..., Any] = FusedBackward.apply
    return apply
