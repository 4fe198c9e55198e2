"""Reasons against the Triton kernels that every operator shares."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version

import torch

MINIMUM_TRITON = (3, 6)
MINIMUM_CAPABILITY = (8, 0)


def _triton_release() -> tuple[int, int] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


TRITON_RELEASE = _triton_release()
"""Major and minor version of the installed Triton, or ``None``. Triton is not imported."""

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether Triton kernels run in Triton's interpreter, on the CPU. Triton decides so once, when
kernels are defined, and so does this."""

CPU_TENSORS_SERVED = INTERPRETING
"""Whether the kernels take CPU tensors. The compile gate sets it: there nothing is run."""


def triton_reasons(*tensors: torch.Tensor | None) -> list[str]:
    """Return every reason why no Triton kernel can run on ``tensors`` (``None`` is skipped)."""
    reasons = []
    if TRITON_RELEASE is None:
        reasons.append("Triton is not installed: pip install 'triton>=3.6'")
    elif TRITON_RELEASE < MINIMUM_TRITON:
        reasons.append(
            f"Triton {'.'.join(map(str, TRITON_RELEASE))} is older than 3.6: "
            "pip install 'triton>=3.6'"
        )
    present = [tensor for tensor in tensors if tensor is not None]
    device = present[0].device
    if device.type == "cuda":
        if torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device)
            if capability < MINIMUM_CAPABILITY:
                reasons.append(
                    f"{device} has compute capability {capability[0]}.{capability[1]}, "
                    "the kernels need 8.0 or newer"
                )
    elif device.type != "cpu":
        reasons.append(f"the tensors are on {device}, the kernels run on CUDA devices")
    elif not CPU_TENSORS_SERVED:
        reasons.append(
            "the tensors are on the CPU, the kernels run on CUDA devices "
            "(and, for tests, in Triton's interpreter with TRITON_INTERPRET=1)"
        )
    if any(tensor.dtype == torch.float64 for tensor in present):
        reasons.append("the kernels accumulate in float32 and a tensor is float64")
    return reasons
