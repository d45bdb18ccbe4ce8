"""A small GPT-2 of Hugging Face transformers whose ``lm_head`` and cross-entropy are replaced by ``GramHead``.

    python examples/transformers_gpt2.py --text corpus.txt

The model is built from a config, so nothing is downloaded. Two copies are trained on the same text: one as it is, and one
with a GramHead that shares its weight with the input embedding, as ``lm_head`` does. Compare the step times and the memory;
the losses are logarithms of different distributions. Without ``--text`` it reads Python's own help pages.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from spherical_loss import GramHead, SphericalLoss, SphericalSoftmaxLoss


class GramGPT2(nn.Module):
    """GPT-2 without logits: the transformer, and a head whose weight is the input embedding's."""

    def __init__(self, config: GPT2Config, loss: SphericalLoss) -> None:
        super().__init__()
        self.transformer = GPT2Model(config)
        self.head = GramHead(config.n_embd, config.vocab_size, bias=False, init="zero")
        self.head.weight = self.transformer.wte.weight  # one parameter, with the gradients of both uses
        self.loss = loss

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.transformer(input_ids=tokens).last_hidden_state

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of each token but the first, given those before it."""
        return self.loss(self.head(self.hidden(tokens)[:, :-1], tokens[:, 1:]))

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int, k: int | None = None) -> Tensor:
        """Append ``length`` tokens to ``(1, T)``, drawn from the loss's distribution; with ``k``, from its best k tokens."""
        for _ in range(length):
            context = tokens[:, -self.transformer.config.n_positions :]
            hidden = self.hidden(context)[:, -1]
            p = self.loss.probabilities(self.head.logits(hidden))
            if k is not None:
                best = self.head.topk(hidden, k, self.loss).classes
                p = torch.zeros_like(p).scatter(1, best, p.gather(1, best))
            tokens = torch.cat([tokens, torch.multinomial(p, 1)], 1)
        return tokens


class Words:
    """A text as numbers: the most frequent of its words, spaces and signs; the rest share one number."""

    def __init__(self, text: str, size: int) -> None:
        pieces = re.findall(r"\w+|\s+|[^\w\s]", text)
        self.vocabulary = ["?", *(piece for piece, _ in Counter(pieces).most_common(size - 1))]
        number = {piece: i for i, piece in enumerate(self.vocabulary)}
        self.tokens = torch.tensor([number.get(piece, 0) for piece in pieces])

    def batch(self, step: int, size: int, length: int) -> Tensor:
        """``(size, length)`` tokens, from random places that depend on the step alone."""
        starts = torch.randint(len(self.tokens) - length, (size, 1), generator=torch.Generator().manual_seed(step))
        return self.tokens[starts + torch.arange(length)]

    def text(self, tokens: Tensor) -> str:
        return "".join(self.vocabulary[i] if i < len(self.vocabulary) else "?" for i in tokens.tolist())


class Report(NamedTuple):
    losses: list[float]
    seconds: list[float]
    peak_mib: float


def config(options: argparse.Namespace) -> GPT2Config:
    return GPT2Config(
        vocab_size=options.vocabulary,
        n_positions=options.length,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def cross_entropy(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(kind: str, words: Words, options: argparse.Namespace) -> Report:
    """Train one of the two models in its own process, since the peak memory is that of the process."""
    torch.manual_seed(0)
    model: nn.Module = GramGPT2(config(options), SphericalSoftmaxLoss()) if kind == "gram" else GPT2LMHeadModel(config(options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses, seconds = [], []
    for step in range(options.steps):
        tokens = words.batch(step, options.batch_size, options.length)
        start = time.perf_counter()
        value = model(tokens) if kind == "gram" else cross_entropy(model, tokens)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(value.item())
    torch.save(model.state_dict(), options.folder / f"{kind}.pt")
    unit = 2**20 if sys.platform == "darwin" else 2**10  # the unit of the system: bytes or KiB
    return Report(losses, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gpt2"), help="where the trained models go")
    parser.add_argument("--text", type=Path, help="a text file to learn")
    parser.add_argument("--vocabulary", type=int, default=32_768, help="D")
    parser.add_argument("--width", type=int, default=128, help="d")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4, help="of the attention")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    text = options.text.read_text(encoding="utf-8") if options.text else "\n".join(topics.values())
    words = Words(text, options.vocabulary)
    print(f"{len(words.tokens):,} tokens, {len(words.vocabulary):,} different ones")
    for kind in ("gram", "lm_head"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            report = process.submit(train, kind, words, options).result()
        times = torch.tensor(report.seconds)
        print(
            f"{kind}: loss {report.losses[0]:.3f} -> {report.losses[-1]:.3f}, a step {1000 * times.median():.0f} ms, "
            f"peak memory {report.peak_mib:.0f} MiB"
        )
    model = GramGPT2(config(options), SphericalSoftmaxLoss())
    model.load_state_dict(torch.load(options.folder / "gram.pt", weights_only=True))
    prompt = words.tokens[: min(16, options.length)].unsqueeze(0)
    print(words.text(model.eval().generate(prompt, 40, k=20)[0]))


if __name__ == "__main__":
    main()
