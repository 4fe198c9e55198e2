"""The package holds its name, and declares no operator yet."""

from importlib.metadata import entry_points, version

import neuralops.attn


def test_version():
    assert neuralops.attn.__version__ == version("neuralops-attn")


def test_every_public_name_is_there():
    assert all(hasattr(neuralops.attn, name) for name in neuralops.attn.__all__)


def test_no_entry_point_names_what_is_missing():
    points = [p for p in entry_points(group="neuralops.ops") if p.dist.name == "neuralops-attn"]
    assert [point.name for point in points] == []
