"""What a step of the sharded factored head would cost on larger machines: ``python -m benchmarks.scale``.

Only one number here is measured: the share of the matrix-multiplication rate that a step of one process reaches
(results/bench.json, from ``make bench``). The rest is the formula of docs/scale.md with figures that can be replaced:

    python -m benchmarks.scale --rate 67e12 --bandwidth 50e9 --batch 512
"""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

from benchmarks.steps import step_flops
from benchmarks.timing import RESULTS, readable
from spherical_loss.experiments.table import Table, show


class Step(NamedTuple):
    """One rank of R, with n examples each, N = R n in total."""

    rows: int
    memory: float
    """Bytes of its rows of V."""
    exchanged: float
    """Bytes it sends, and receives, in a step."""
    compute: float
    network: float
    """Seconds."""


HEADER = ["D", "ranks", "rows each", "memory each", "exchanged", "compute", "network", "step"]


def step(D: int, ranks: int, n: int, d: int, rate: float, bandwidth: float, latency: float) -> Step:
    N, rows = ranks * n, -(-D // ranks)
    # Rings: an all-reduce of x bytes moves 2 x (R - 1) / R through each rank, an all-gather of x in all moves x (R - 1) / R.
    ring = (ranks - 1) / ranks
    target_rows, records = 4 * N * d, 4 * N * (3 * d + 3) + 16 * N
    exchanged = ring * (2 * target_rows + records)
    network = exchanged / bandwidth + 6 * 2 * (ranks - 1) * latency  # six collectives per step
    return Step(rows, 4.0 * rows * d, exchanged, step_flops(N, d) / rate, network)


def measured_efficiency() -> float:
    """The share of the matrix-multiplication rate that the step reaches here."""
    path = RESULTS / "bench.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing; make it with: make bench")
    rows = json.loads(path.read_text()).get("side-by-side", [])
    shares = [row["of_matmul"] for row in rows if "of_matmul" in row]
    if not shares:
        raise SystemExit(f"{path} has no figures of the factored head; make them with: python -m benchmarks side-by-side")
    return float(shares[0])


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rate", type=float, default=19.5e12, help="float32 operations per second (default: %(default)g, an A100)"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=25e9, help="bytes per second and rank (default: %(default)g, 200 Gb/s)"
    )
    parser.add_argument("--latency", type=float, default=5e-6, help="seconds per hop (default: %(default)g)")
    parser.add_argument("--batch", type=int, default=256, help="examples per rank (default: %(default)s)")
    parser.add_argument("--d", type=int, default=512, help="hidden size (default: %(default)s)")
    return parser


def main() -> None:
    options = parser_of_options().parse_args()
    show(table(options))


def table(options: argparse.Namespace) -> Table:
    efficiency, rows = measured_efficiency(), []
    for D in (10**8, 10**9):
        for ranks in (8, 64, 512):
            s = step(D, ranks, options.batch, options.d, efficiency * options.rate, options.bandwidth, options.latency)
            name, memory = f"10^{len(str(D)) - 1}", f"{s.memory / 2**30:.1f} GiB"
            times = [readable(t) for t in (s.compute, s.network, s.compute + s.network)]
            rows.append([name, str(ranks), f"{s.rows:,}", memory, f"{s.exchanged / 2**20:,.0f} MiB", *times])
    return Table(title(options), HEADER, rows)


def title(options: argparse.Namespace) -> str:
    network = f"{options.bandwidth:g} bytes/s, {options.latency:g} s latency"
    computer = f"{measured_efficiency():.0%} of {options.rate:g} operations/s"
    return f"d={options.d}, {options.batch} examples per rank, {computer}, {network}"


if __name__ == "__main__":
    main()
