"""The instruments: parity, bench, doctor and the compile gate, for every declared operator.

``python -m neuralops.core --help`` lists them.
"""
