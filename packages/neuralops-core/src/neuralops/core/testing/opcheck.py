"""Checks the registered operators behind a public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace.startswith("neuralops_"):
            detached = tree_map(_detach, (args, kwargs or {}))
            self.calls.append((func, *detached))
        return func(*args, **(kwargs or {}))


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def opcheck_calls(run: Callable[[], Any]) -> list[str]:
    """Run ``run`` and pass every registered operator it calls to ``torch.library.opcheck``.

    Returns:
        The names of the operators checked.

    Raises:
        torch.testing._internal.optests.OpCheckError: an operator's schema, fake or behaviour under
            compilation is wrong.
    """
    with _Recorder() as recorder:
        run()
    for operator, args, kwargs in recorder.calls:
        torch.library.opcheck(operator, args, kwargs)
    return [operator.name() for operator, _, _ in recorder.calls]
