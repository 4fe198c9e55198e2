"""The factorised matrix state: linear attention with a constant decay for each head."""

from neuralops.ssm.fms.api import fms_scan, fms_step

__all__ = ["fms_scan", "fms_step"]
