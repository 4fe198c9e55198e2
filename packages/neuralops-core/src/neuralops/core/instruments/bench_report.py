"""What the benchmark shows and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuralops.core.instruments.bench_measure import Record
from neuralops.core.instruments.common import environment_markdown, unique, write_json
from neuralops.core.instruments.tables import Table

COLUMNS = (
    "shape", "dtype", "who", "fwd ms", "floor", "GB/s", "fwd+bwd ms", "floor", "GB/s",
    "times ours", "peak MiB", "launches", "cold s", "host us",
)  # fmt: skip
WORDS = {
    "absent": "absent",
    "forward": "FAIL",
    "backward": "no backward",
    "cold": "cold FAIL",
    "precision": "",
}
QUANTITIES = {
    "forward": ("forward_ms", "floor_forward_ms"),
    "forward + backward": ("both_ms", "floor_both_ms"),
}


def summary(records: Sequence[Record], title: str, note: str) -> Table:
    """Return the table of all records."""
    precision = any(record.error_output is not None for record in records)
    table = Table(
        title,
        (*COLUMNS, *(("error out / grad",) if precision else ()), ""),
        text_columns=3,
        note="\n".join([note, *problems(records)]),
    )
    for record in records:
        ours = next(
            r for r in records
            if (r.shape, r.dtype, r.peer) == (record.shape, record.dtype, False)
        )  # fmt: skip
        table.add(*_cells(record, ours, precision))
    return table.without_empty_columns()


def _cells(record: Record, ours: Record, precision: bool) -> list[str]:
    return [
        record.shape,
        record.dtype,
        record.contender,
        _number(record.forward_ms),
        _share(record.floor_forward_ms, record.forward_ms),
        _rate(record.forward_bytes, record.forward_ms),
        _number(record.both_ms),
        _share(record.floor_both_ms, record.both_ms),
        _rate(record.both_bytes, record.both_ms),
        _pair(
            _ratio(record.forward_ms, ours.forward_ms), _ratio(record.both_ms, ours.both_ms)
        ) if record.peer else "",
        "" if record.peak_mib is None else f"{record.peak_mib:.0f}",
        _pair(_count(record.launches_forward), _count(record.launches_backward)),
        "" if record.cold_seconds is None else f"{record.cold_seconds:.1f}",
        "" if record.host_us is None else f"{record.host_us:.0f}",
        *([_pair(_error(record.error_output), _error(record.error_gradient))] if precision else []),
        next((WORDS[what] for what in record.problems), ""),
    ]  # fmt: skip


def problems(records: Sequence[Record]) -> list[str]:
    """Return a line for each problem, with the shapes that have it."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        for what, why in record.problems.items():
            found.setdefault((record.contender, what, why), []).append(record.shape)
    total = len(unique(record.shape for record in records))
    return [
        f"{name}, {what}, {'every shape' if len(unique(shapes)) == total else '; '.join(shapes)}: "
        f"{why}"
        for (name, what, why), shapes in found.items()
    ]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _pair(first: str, second: str) -> str:
    return f"{first} / {second or '-'}" if first else ""


def _share(floor: float | None, taken: float | None) -> str:
    return "" if floor is None or taken is None else f"{100 * floor / taken:.0f} %"


def _rate(moved: int | None, taken: float | None) -> str:
    return "" if moved is None or taken is None else _number(moved / taken / 1e6)


def _ratio(theirs: float | None, ours: float | None) -> str:
    return "" if theirs is None or ours is None else f"{theirs / ours:.2f}"


def write(
    folder: Path,
    stem: str,
    table: Table,
    records: Sequence[Record],
    environment: Mapping[str, Any],
    copy_rate: float,
) -> list[Path]:
    """Write JSON, Markdown and a plot for each series of workloads; return the paths."""
    data, page = folder / f"{stem}.json", folder / f"{stem}.md"
    rows = [asdict(record) for record in records]
    write_json(
        data, {"environment": environment, "copy_bytes_per_second": copy_rate, "records": rows}
    )
    plots = []
    for series in unique(r.series for r in records if r.series is not None):
        for dtype in unique(r.dtype for r in records):
            chosen = [r for r in records if (r.series, r.dtype) == (series, dtype)]
            if len({r.length for r in chosen if r.forward_ms is not None}) > 1:
                name = "".join(c if c.isalnum() else "-" for c in series.lower())
                path = folder / f"{stem}-{name}-{dtype}.png"
                _plot(path, chosen, f"{table.title}, {series}, {dtype}")
                plots.append(path)
    images = "".join(f"\n![time over length, {plot.stem}]({plot.name})\n" for plot in plots)
    page.write_text(
        f"## {table.title}\n\n{environment_markdown(environment)}\n{table.markdown()}{images}"
    )
    return [data, page, *plots]


def _plot(path: Path, records: Sequence[Record], title: str) -> None:
    """Draw the time over the length, with the floor, forward and forward + backward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharex=True)
    for panel, (quantity, (attribute, floor)) in zip(panels, QUANTITIES.items()):
        for name in unique(record.contender for record in records):
            own = [r for r in records if r.contender == name]
            points = _points(own, attribute)
            style = "--" if own[0].peer else "-"
            if points:
                panel.plot(*zip(*points), marker="o", linestyle=style, label=name)
        bound = _points([r for r in records if not r.peer], floor)
        if bound:
            panel.plot(*zip(*bound), color="gray", linestyle=":", label="floor: bytes / copy rate")
        panel.set(xscale="log", yscale="log", xlabel="L, tokens", ylabel="ms", title=quantity)
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _points(records: Sequence[Record], attribute: str) -> list[tuple[int, float]]:
    found = [(record.length, getattr(record, attribute)) for record in records]
    return sorted((length, value) for length, value in found if value is not None)
