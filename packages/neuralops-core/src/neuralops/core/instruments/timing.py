"""Clocks: device time, host time, peak memory, kernel launches and the copy rate."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch

Run = Callable[[], object]

HEAD_START_CYCLES = 4_000_000
FLUSH_BYTES = 256 * 2**20
"""Overwritten before each timed run on a GPU: several times the largest L2 cache."""
ROUNDS = 5
"""The contenders take turns this many times, so that a drift of the clock hits all alike."""
MOST = 200
"""The largest number of timed runs; the smallest is one in each round."""


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_once(run: Run, device: torch.device) -> float:
    """Return the seconds that one run takes, the wait for it included."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def time_interleaved(
    runs: Mapping[str, Run], device: torch.device, budget: float
) -> dict[str, float]:
    """Return the median milliseconds of each run, which take turns. They are warm already.

    Args:
        runs: what to time.
        device: where they run; CUDA events time it on a GPU, and the L2 cache is flushed.
        budget: about how many seconds to spend on each.
    """
    flush = _flush_buffer(device)
    turns = {name: _runs_a_turn(run, device, budget) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name] += _time_turn(run, turns[name], device, flush)
    return {name: median(taken) for name, taken in times.items()}


def _runs_a_turn(run: Run, device: torch.device, budget: float) -> int:
    once = min(time_once(run, device) for _ in range(2))
    return max(1, min(MOST, int(budget / max(once, 1e-6))) // ROUNDS)


def _flush_buffer(device: torch.device) -> torch.Tensor | None:
    if device.type != "cuda":
        return None
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def _time_turn(
    run: Run, count: int, device: torch.device, flush: torch.Tensor | None
) -> list[float]:
    if flush is None:
        return [1e3 * time_once(run, device) for _ in range(count)]
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for start, end in events:
        flush.zero_()
        # The device is kept busy while the host prepares the run: only the device's work is timed.
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def host_microseconds(run: Run, device: torch.device) -> float:
    """Return how long the caller is busy with one run, without waiting for the device."""
    taken = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(20):
            run()
        taken.append((time.perf_counter() - start) / 20)
    synchronize(device)
    return 1e6 * median(taken)


def peak_mebibytes(run: Run, device: torch.device) -> float | None:
    """Return the peak of allocated memory beyond what was held before, on a GPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def launches(run: Run, device: torch.device) -> int | None:
    """Return how many kernels one run launches on a GPU; ``None`` where that cannot be seen."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("cat") == "kernel" for event in events) or None


def copy_rate(device: torch.device) -> float:
    """Return the bytes a second of a large copy, read and written, by which floors are judged."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy()
    taken = time_interleaved({"copy": copy}, device, budget=0.1)["copy"]
    return 2 * size / (taken * 1e-3)
