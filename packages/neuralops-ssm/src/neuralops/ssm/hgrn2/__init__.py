"""The gated elementwise recurrence of HGRN and HGRN2."""

from neuralops.ssm.hgrn2.api import hgrn2_scan, hgrn2_step

__all__ = ["hgrn2_scan", "hgrn2_step"]
