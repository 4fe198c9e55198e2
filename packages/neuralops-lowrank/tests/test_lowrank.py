"""The package holds its name, and declares no operator yet."""

from importlib.metadata import entry_points, version

import neuralops.lowrank


def test_version():
    assert neuralops.lowrank.__version__ == version("neuralops-lowrank")


def test_every_public_name_is_there():
    assert all(hasattr(neuralops.lowrank, name) for name in neuralops.lowrank.__all__)


def test_no_entry_point_names_what_is_missing():
    points = [p for p in entry_points(group="neuralops.ops") if p.dist.name == "neuralops-lowrank"]
    assert [point.name for point in points] == []
