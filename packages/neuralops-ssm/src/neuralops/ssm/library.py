"""The operators of this family that are registered with PyTorch."""

from neuralops.core.library import OperatorLibrary

LIBRARY = OperatorLibrary("neuralops_ssm")
