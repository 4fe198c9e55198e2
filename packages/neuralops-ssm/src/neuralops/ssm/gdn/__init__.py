"""Gated DeltaNet and its normalised-least-mean-squares sibling."""

from neuralops.ssm.gdn.api import gdn_scan, gdn_step, nlms_scan, nlms_step

__all__ = ["gdn_scan", "gdn_step", "nlms_scan", "nlms_step"]
