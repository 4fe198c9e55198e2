"""The benchmark, on the CPU and few repetitions."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
CPU = ("--device", "cpu", "--quick", "--out", "out")


def test_times_the_operator_and_its_peers(toy) -> None:
    result = toy.run("bench", "toy_gate", "--precision", *CPU)
    assert result.code == 0, result.output
    content = json.loads((result.out / "toy_gate-cpu.json").read_text())
    records = {(r["shape"], r["contender"]): r for r in content["records"]}
    ours = records["L1024 D64", "neuralops torch"]
    assert 0 < ours["forward_ms"] < ours["both_ms"]
    assert ours["forward_bytes"] == 3 * 1024 * 64 * 4 and ours["both_bytes"] == 8 * 1024 * 64 * 4
    assert ours["error_output"] < 1e-6 and ours["error_gradient"] < 1e-6
    assert records["L256 D64", "eager"]["both_ms"] > 0
    refusing = records["L256 D64", "forward only"]
    assert refusing["forward_ms"] > 0 and "no backward here" in refusing["problems"]["backward"]
    assert "a_library_that_is_not_installed" in records["L256 D64", "missing"]["problems"]["absent"]
    assert "out of order" in records["L256 D64", "broken"]["problems"]["forward"]
    assert content["copy_bytes_per_second"] > 0 and content["environment"]["torch"]
    page = (result.out / "toy_gate-cpu.md").read_text()
    assert "| L1024 D64 | fp32 | neuralops torch |" in page
    assert (result.out / "toy_gate-cpu-d64-fp32.png").read_bytes().startswith(b"\x89PNG")


def test_selects_shapes_peers_backends_and_dtypes(toy) -> None:
    result = toy.run(
        "bench", "toy_gate", "--shape", "L256", "--peer", "eager", "--dtype", "bf16",
        "--backend", "torch", "--backend", "reference", *CPU,
    )  # fmt: skip
    assert result.code == 0, result.output
    records = json.loads((result.out / "toy_gate-cpu.json").read_text())["records"]
    assert [(r["shape"], r["dtype"], r["contender"]) for r in records] == [
        ("L256 D64", "bf16", "neuralops torch"),
        ("L256 D64", "bf16", "neuralops reference"),
        ("L256 D64", "bf16", "eager"),
    ]


def test_measures_a_cold_start(toy) -> None:
    result = toy.run(
        "bench", "toy_gate", "--shape", "L256", "--peer", "none", "--budget", "0.01",
        "--device", "cpu", "--out", "out",
    )  # fmt: skip
    assert result.code == 0, result.output
    (record,) = json.loads((result.out / "toy_gate-cpu.json").read_text())["records"]
    assert 0 < record["cold_seconds"] < 10


def test_refuses_to_time_zeros(toy) -> None:
    toy.edit("op", "uniform((length, 64), -1, 1,", "uniform((length, 64), 0, 0,")
    result = toy.run("bench", "toy_gate", *CPU)
    assert result.code == 2 and "the input x is zero throughout" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown operator 'nothing'"),
        (["toy_gate", "--shape", "L7"], "no workload of toy_gate is called 'L7': L256 D64"),
        (["toy_gate", "--peer", "fla"], "has no peer 'fla'"),
        (["toy_gate", "--backend", "cuda"], "has no backend 'cuda'"),
        (["toy_gate", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_wrong_request_says_so(refused, arguments: list[str], message: str) -> None:
    assert message in refused("bench", *arguments, "--device", "cpu")
