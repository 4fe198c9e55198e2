"""State-space model operators with fused Triton kernels and a fast PyTorch path."""

from neuralops.ssm.fms import fms_scan, fms_step
from neuralops.ssm.gdn import gdn_scan, gdn_step, nlms_scan, nlms_step
from neuralops.ssm.gla import gla_scan, gla_step
from neuralops.ssm.hgrn2 import hgrn2_scan, hgrn2_step

__version__ = "0.1.0"

__all__ = [
    "fms_scan",
    "fms_step",
    "gdn_scan",
    "gdn_step",
    "gla_scan",
    "gla_step",
    "hgrn2_scan",
    "hgrn2_step",
    "nlms_scan",
    "nlms_step",
]
