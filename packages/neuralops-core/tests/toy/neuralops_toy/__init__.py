"""A family of one operator, as small as one can be: what the tests of the instruments install."""

from neuralops_toy.api import toy_gate

__all__ = ["toy_gate"]
