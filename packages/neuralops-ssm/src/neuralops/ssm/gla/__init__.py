"""Gated linear attention: a matrix state with a gate for each key channel, or for each head."""

from neuralops.ssm.gla.api import gla_scan, gla_step

__all__ = ["gla_scan", "gla_step"]
