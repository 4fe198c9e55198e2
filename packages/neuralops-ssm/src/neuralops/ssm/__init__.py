"""State-space model operators with fused Triton kernels and a fast PyTorch path."""

from neuralops.ssm.hgrn2 import hgrn2_scan, hgrn2_step

__version__ = "0.1.0"

__all__ = ["hgrn2_scan", "hgrn2_step"]
