"""Low-rank projection operators. This release reserves the name; it has no operator yet."""

__version__ = "0.1.0"

__all__: list[str] = []
