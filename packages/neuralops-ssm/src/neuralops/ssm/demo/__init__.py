"""A byte-level language model with one of this package's operators as its token mixer.

Run it with ``python -m neuralops.ssm.demo``.
"""


class DemoError(Exception):
    """The demo cannot go on; the message tells the user why and what to do."""
