"""Draws the README's picture of the speed from the recorded GPU benchmarks.

``python docs/speed.py`` reads ``docs/results/*-gpu.json`` and writes ``docs/speed.png``. It needs
matplotlib.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
OURS, PEER, FLOOR = "#3f51b5", "#c9ccd6", "#111111"


def read() -> tuple[list[tuple[str, float, float, float]], str, str]:
    """Return (label, ours, the peer's, the floor) in ms for each shape, the GPU and the peer."""
    rows, gpu, peer_name = [], "", ""
    for path in sorted((DOCS / "results").glob("*_scan-gpu.json")):
        recorded = json.loads(path.read_text())
        gpu = recorded["environment"]["gpu"]
        ours = {r["shape"]: r for r in recorded["records"] if not r["peer"]}
        for peer in (r for r in recorded["records"] if r["peer"] and r["both_ms"]):
            own = ours[peer["shape"]]
            if own["length"] >= 1024:
                label = f"{own['operator']}\n{own['shape']}"
                rows.append((label, own["both_ms"], peer["both_ms"], own["floor_both_ms"]))
                peer_name = peer["contender"]
    return rows, gpu, peer_name


def draw() -> None:
    """Draw the picture."""
    rows, gpu, peer_name = read()
    figure, axes = plt.subplots(figsize=(8, 0.62 * len(rows) + 1.1), layout="constrained")
    for i, (_, own, peer, floor) in enumerate(rows):
        axes.barh(i - 0.19, own, 0.36, color=OURS, label="NeuralOps" if i == 0 else None)
        axes.barh(i + 0.19, peer, 0.36, color=PEER, label=peer_name if i == 0 else None)
        name = "bytes moved once, at copy speed" if i == 0 else None
        axes.plot((floor, floor), (i - 0.4, i + 0.4), color=FLOOR, linewidth=1.2, label=name)
        axes.text(peer, i + 0.19, f" {peer / own:.1f} x", va="center", fontsize=8, color="#555555")
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"forward and backward, ms, bfloat16, {gpu}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=3)
    figure.savefig(DOCS / "speed.png", dpi=160)


if __name__ == "__main__":
    draw()
