"""What launchers ask of a device."""

from __future__ import annotations

from functools import cache

import torch

TYPICAL_MULTIPROCESSORS = 132


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors ``device`` has.

    A CPU tensor is met only in Triton's interpreter and by the compile gate; it is treated like
    one on an H100 or H200, so that both see the configurations that these run.
    """
    if device.type != "cuda":
        return TYPICAL_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
