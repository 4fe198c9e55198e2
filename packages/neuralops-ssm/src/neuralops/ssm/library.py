"""The operators of this family that are registered with PyTorch."""

from neuralops.core.library import OperatorLibrary

LIBRARY = OperatorLibrary("neuralops_ssm")

UNPROVEN_KERNELS = (
    "its kernels have not yet passed every test on a GPU; backend='triton' runs them all the same"
)
"""Why an operator's kernels run only when they are asked for."""
