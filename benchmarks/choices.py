"""Which head and which loss for how many classes, with the measured figure behind each choice: for the guides."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.quality import page as quality_page
from benchmarks.steps import Row
from benchmarks.timing import factor
from spherical_loss.experiments.results.paper import TABLES
from spherical_loss.experiments.table import Table, markdown

DENSE = "dense + cross-entropy + SGD"
SAMPLED, ADAPTIVE = "sampled softmax", "adaptive spherical softmax, Taylor"
N, d = 250, 256  # of the gains


def heads(measured: dict[str, Any], crossings: list[Row], classes: dict[str, Any], time: dict[str, Any]) -> str:
    gram = next(row for row in measured["gram"] if row["name"] == "F.linear + F.cross_entropy")
    step = next(row for row in measured["adaptive"] if row.get("name") == DENSE)
    few, many = (classes[words] for words in ("10,000", "100,000"))
    part = smallest(time)
    rows = [
        ["up to about 4 d", "`nn.Linear` or `DenseHead`", f"`FactoredHead` has {gain(crossings, 1_000)}"],
        [
            "thousands, with AdamW, momentum or tied weights",
            "`GramHead`",
            f"{factor(gram['ratio'][0])}x the speed of `F.linear` and `F.cross_entropy` at N={gram['N']:,}, d={gram['d']}, "
            f"D={gram['D']:,}",
        ],
        [
            "thousands, with plain SGD",
            "`FactoredHead`",
            f"{gain(crossings, 8_000)}; tiers have {tiers(few)} times its perplexity at {few['words']:,} words",
        ],
        [
            "100,000 and more, some much more frequent than others",
            "`TieredHead`",
            f"{tiers(many)} times the perplexity of one head at {many['words']:,} words, after "
            f"{many['budget']['training']:,} steps; three tiers {tiers(part, quality_page.THREE_TIERS)} times, {after(part)}",
        ],
        [
            "the same, and probabilities count",
            "`AdaptiveSphericalSoftmax`",
            f"{likelihoods(time)}; a step has {factor(step['ratio'][0])}x the speed of dense at D={step['D']:,}",
        ],
    ]
    return markdown(Table("", ["classes", "take", "measured"], rows))


def losses(time: dict[str, Any]) -> str:
    cifar10, cifar100, ptb = (next(t for t in TABLES.values() if t.task == task) for task in ("cifar10", "cifar100", "ptb"))
    part = smallest(time)
    rows = [
        ["10", "Taylor softmax", f"{errors(cifar10)} on CIFAR-10, in the paper"],
        ["100", "softmax or Taylor softmax", f"{errors(cifar100)} on CIFAR-100, in the paper"],
        ["10,000, perplexity", "softmax", f"{perplexities(ptb)} on Penn Treebank, in the paper"],
        [
            "100,000 and more, ranking, one member of the family",
            "Z-loss on a `TieredHead`",
            f"top-10 error {top10(part, quality_page.Z_LOSS)}, Taylor softmax {top10(part, quality_page.THREE_TIERS)}, on one "
            f"head {top10(part, quality_page.ONE_HEAD)}, sampled softmax {top10(part, SAMPLED)}, {after(part)}",
        ],
        ["100,000 and more, perplexity", "`AdaptiveSphericalSoftmax` or `SampledSoftmax`", likelihoods(time)],
    ]
    return markdown(Table("", ["classes, and what counts", "take", "measured"], rows))


def gain(crossings: list[Row], D: int) -> str:
    row = next(row for row in crossings if (row["N"], row["d"], row["D"]) == (N, d, D))
    return f"{row['dense'][0] / row['factored'][0]:.1f}x the speed of dense at N={N}, d={d}, D={D:,}"


def tiers(part: dict[str, Any], contender: str = quality_page.TIERS) -> str:
    """The perplexity of tiers in that of one head, seeds paired."""
    one, tiered = (
        {run["seed"]: run["end"]["perplexity"] for run in quality_page.finished(part, name)}
        for name in (quality_page.ONE_HEAD, contender)
    )
    return f"{statistics.fmean(tiered[seed] / one[seed] for seed in one.keys() & tiered.keys()):.2f}"


def top10(part: dict[str, Any], name: str) -> str:
    return f"{100 * statistics.fmean(run['end']['top10'] for run in quality_page.finished(part, name)):.1f}%"


def smallest(time: dict[str, Any]) -> dict[str, Any]:
    """The smallest vocabulary of the study."""
    return min(time.values(), key=lambda part: part["words"])


def after(part: dict[str, Any]) -> str:
    return f"after {part['budget']['training'] / 60:g} minutes at {part['words']:,} words"


def likelihoods(time: dict[str, Any]) -> str:
    """The perplexities of ours and of the sampled softmax."""
    part = smallest(time)
    ours, sampled = (
        statistics.fmean(run["end"]["perplexity"] for run in quality_page.finished(part, name)) for name in (ADAPTIVE, SAMPLED)
    )
    return f"perplexity {ours:.0f}, the sampled softmax {sampled:.0f}, {after(part)}"


def errors(table: Any) -> str:
    taylor, softmax = (100 * table.rows[loss].error.mean for loss in ("taylor", "softmax"))
    return f"error {taylor:.3g}%, softmax {softmax:.3g}%"


def perplexities(table: Any) -> str:
    taylor, softmax = (table.rows[loss] for loss in ("taylor", "softmax"))
    return (
        f"perplexity {softmax.perplexity.mean:.0f}, Taylor {taylor.perplexity.mean:.0f} (top-10 error "
        f"{100 * softmax.top10.mean:.1f}%, {100 * taylor.top10.mean:.1f}%)"
    )
