"""What gradient features cost, and how well they keep inner products.

    python benchmarks/gradient_features.py            # some minutes on two cores; writes benchmarks/results/gradient_features.{md,png}

Measured on a Llama of ten million parameters, with the two sides of each ratio taking turns in one process; the ratio is that of the
medians.
"""

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatrain.engine import Engine
from lightning_megatrain.model_ops import GradientSettings, gradient_features
from lightning_megatrain.model_ops.signs import key_of, rademacher

mpl.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

RESULTS = Path(__file__).parent / "results"
SAMPLES, TOKENS, VOCABULARY = 8, 128, 4096


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=9, num_attention_heads=4, tie_word_embeddings=True
    )
    return LlamaForCausalLM(config).eval()


def make_batch(samples: int = SAMPLES) -> dict[str, Tensor]:
    """Samples in pairs: the second of each shares half of its tokens with the first, so that cosines are spread."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (samples, TOKENS), generator=generator)
    for sample in range(1, samples, 2):
        ids[sample, : TOKENS * sample // samples] = ids[sample - 1, : TOKENS * sample // samples]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def forward_backward(model: LlamaForCausalLM, batch: dict[str, Tensor]) -> None:
    model(**batch, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def loop_with_dense_projection(model: LlamaForCausalLM, batch: dict[str, Tensor], width: int) -> Tensor:
    """The usual way: a gradient per sample from batches of one, then an FP32 sign matrix made block by block, once for all samples."""
    gradients = torch.stack([flat_gradient(model, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(len(batch["input_ids"]))])
    return dense_projection(gradients, width)


def flat_gradient(model: LlamaForCausalLM, batch: dict[str, Tensor]) -> Tensor:
    model(**batch, use_cache=False).loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return flat


def dense_projection(gradients_NP: Tensor, width: int, seed: int = 0) -> Tensor:
    block = 2**22 // width
    out = torch.zeros(len(gradients_NP), width)
    for rows in torch.arange(gradients_NP.shape[1]).split(block):
        out += gradients_NP[:, rows[0] : rows[-1] + 1] @ rademacher(key_of(seed), rows, width)
    return out / width**0.5


def compare(one: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the medians of two calls taking turns: seconds by the clock, and seconds of processor time over all threads."""
    one(), other()
    clock: tuple[list[float], list[float]] = ([], [])
    processor: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, call in enumerate((one, other)):
            gc.collect()
            started = time.perf_counter(), time.process_time()
            call()
            clock[side].append(time.perf_counter() - started[0])
            processor[side].append(time.process_time() - started[1])
    return (statistics.median(clock[0]), statistics.median(processor[0])), (statistics.median(clock[1]), statistics.median(processor[1]))


def cosines(features: Tensor) -> Tensor:
    normalised = torch.nn.functional.normalize(features.double(), dim=1)
    return (normalised @ normalised.T)[tuple(torch.triu_indices(len(features), len(features), 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, batch = build(), make_batch()
    parameters = sum(p.numel() for p in model.parameters())
    lines = [
        "# Gradient features",
        "",
        f"`python benchmarks/gradient_features.py`, {date.today():%Y-%m-%d}. Llama of {parameters / 1e6:.1f} M parameters (tied "
        "embeddings), "
        f"{SAMPLES} samples of {TOKENS} tokens, FP32, torch {torch.__version__}, {options.threads} threads of {cpu_name()}. The machine "
        "was shared: the two sides of a "
        f"ratio took turns, {options.repeats} times, and the ratio is that of the medians.",
        "",
        "| cost of factored features | width | features | forward and backward | ratio | ratio of processor time | wanted |",
        "|---|---|---|---|---|---|---|",
    ]
    for width in (1024, 4096):
        settings = GradientSettings(width=width)
        plain = compare(lambda s=settings: gradient_features(model, batch, s), lambda: forward_backward(model, batch), options.repeats)
        lines.append(cost_row("plain", width, *plain))
        with Engine(model, "cpu"):
            streamed = compare(
                lambda s=settings: gradient_features(model, batch, s), lambda: forward_backward(model, batch), options.repeats
            )
        lines.append(cost_row("streamed", width, *streamed))
        print("\n".join(lines[-2:]), flush=True)

    width = 1024
    settings = GradientSettings(width=width)
    loop = compare(lambda: gradient_features(model, batch, settings), lambda: loop_with_dense_projection(model, batch, width), 2)
    lines += [
        "",
        f"| rate at width {width} | samples per second |",
        "|---|---|",
        f"| factored, one batch of {SAMPLES} | {SAMPLES / loop[0][0]:.2f} |",
        f"| batches of one, then a dense FP32 projection of all {SAMPLES} gradients at once | {SAMPLES / loop[1][0]:.2f} |",
        f"| ratio (wanted: at least 5) | {loop[1][0] / loop[0][0]:.1f} |",
    ]
    print("\n".join(lines[-3:]), flush=True)
    lines += fidelity(model, options.output)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "gradient_features.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def cost_row(name: str, width: int, features: tuple[float, float], training: tuple[float, float]) -> str:
    ratio, processor = features[0] / training[0], features[1] / training[1]
    return f"| {name} | {width} | {features[0]:.3f} s | {training[0]:.3f} s | **{ratio:.2f}** | {processor:.2f} | at most 1.5 |"


def fidelity(model: LlamaForCausalLM, output: Path) -> list[str]:
    """True against projected cosine for all pairs of samples, and the errors against the bound."""
    batch = make_batch(24)
    gradients = torch.stack([flat_gradient(model, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(24)])
    true = cosines(gradients)
    del gradients
    lines = [
        "",
        "Cosines of all 276 pairs of 24 samples, projected against true. Johnson-Lindenstrauss: the error of a dense projection has a "
        "standard deviation of at most "
        "sqrt((1 + cos^2) / K) for unit vectors; of a factored one, at most sqrt((1 + 2/k)^2 - 1) with k the root of K, reached when the "
        "whole gradient is one matrix of rank "
        "one.",
        "",
        "| projection | width | root mean square error | dense bound | factored worst case | largest error |",
        "|---|---|---|---|---|---|",
    ]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.3), sharex=True, sharey=True)
    for ax, (kind, width) in zip(axes, (("dense", 1024), ("factored", 1024), ("factored", 4096)), strict=True):
        projected = cosines(gradient_features(model, batch, GradientSettings(width=width, projection=kind)))
        error = projected - true
        bound, worst = ((1 + true**2) / width).mean().sqrt().item(), ((1 + 2 / width**0.5) ** 2 - 1) ** 0.5
        rms = error.square().mean().sqrt().item()
        lines.append(
            f"| {kind} | {width} | {rms:.4f} | {bound:.4f} | {worst if kind == 'factored' else bound:.4f} | {error.abs().max():.4f} |"
        )
        print(lines[-1], flush=True)
        line = torch.linspace(float(true.min()), 1, 50, dtype=true.dtype)
        deviation = 3 * ((1 + line**2) / width).sqrt()
        ax.fill_between(line, line - deviation, line + deviation, alpha=0.2, label="true ± 3 sqrt((1 + cos²) / K)")
        ax.plot(line, line, linewidth=0.8, color="black")
        ax.scatter(true, projected, s=8, label=f"{len(true)} pairs, rms error {rms:.3f}")
        ax.set(title=f"{kind}, K = {width}", xlabel="true cosine")
        ax.legend(loc="upper left", fontsize=8)
    axes[0].set_ylabel("projected cosine")
    figure.suptitle("Inner products of gradients after projection, Llama of 10 M parameters")
    figure.tight_layout()
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "gradient_features.png", dpi=110)
    return [*lines, "", "![True against projected cosine](gradient_features.png)"]


def cpu_name() -> str:
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
