"""How fast the optimizer step runs over host memory: HostAdamW, torch's AdamW with the casts a BF16 run needs, DeepSpeed, and a plain copy.

    python benchmarks/host_optimizer.py --parameters 1e8 --rounds 15 --output benchmarks/results/host_optimizer.md

All contestants step the same list of tensors, that of a transformer, in one process and in turn, so that a busy machine slows all of them;
figures are medians over the rounds, ratios medians of the ratio in each round. "GB/s" counts the bytes a step must read and write, not what
it moves beyond that. The copy reads and writes FP32 in equal parts, by the same number of threads, and counts both; what it writes the
processor reads first, as it does not know that all of a line will be overwritten, so 12 bytes pass where 8 count. The read, and the update
of one array in place, pass what they count.
"""

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from lightning_megatrain.optim import HostAdamW, split

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 0.5
PLAIN = ("plain copy", "plain read", "plain update in place")
CASTS = "torch fused, casts and clip"
"""`p.grad = g.float()`, times the clip coefficient, step, BF16 copy, `zero_grad()`: what a BF16 run writes."""


@dataclass
class Contestant:
    """One way to take a step.

    `bytes` is what a parameter's step must read and write: its gradient, and weight, moments and copies as they are stored.
    """

    name: str
    bytes: float
    step: Callable[[], object]


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """A Llama-like stack of about so many parameters: width 1024 (256 if small), a vocabulary of 16384, norms of one row."""
    width = 1024 if parameters > 2e7 else 256
    layer = [(width, width)] * 2 + [(width // 4, width)] * 2 + [(3 * width, width)] * 2 + [(width, 3 * width)] + [(width,)] * 2
    result: list[tuple[int, ...]] = [(min(16384, parameters // (4 * width)), width), (width,)]
    while sum(torch.Size(s).numel() for s in result) < parameters:
        result += layer
    return result


def contestants(which: list[tuple[int, ...]], threads: int) -> Iterator[Callable[[], Contestant]]:
    """Makers of all that can run here."""

    def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        return [nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in which]

    # One set for all contestants, who only read it or fill it with the same values.
    gradients = {dtype: [(torch.randn(shape) * 1e-3).to(dtype) for shape in which] for dtype in (torch.float32, torch.bfloat16)}

    def ours(name: str, size: float, masters: str, moments: str, gradient: torch.dtype, copy: bool) -> Callable[[], Contestant]:
        def make() -> Contestant:
            params, grads = weights(), gradients[gradient]
            if masters == "split":
                for parameter in params:
                    parameter.data = split(parameter.detach())[0]
            optimizer = HostAdamW(params, **HYPERPARAMETERS, masters=masters, moments=moments, threads=threads)
            if copy:
                for parameter in params:
                    optimizer.set_working_copy(parameter, torch.empty_like(parameter, dtype=torch.bfloat16))
            return Contestant(name, size, lambda: optimizer.update(params, grads, grad_scale=CLIP))

        return make

    def torchs(name: str, cast: str = "", **options: bool) -> Callable[[], Contestant]:
        def make() -> Contestant:
            params = weights()
            for parameter, gradient in zip(params, gradients[torch.float32], strict=True):
                parameter.grad = gradient if cast != "new" else None
            arrived = gradients[torch.bfloat16] if cast else []
            streamed = [torch.empty_like(p, dtype=torch.bfloat16) for p in params] if cast else []
            optimizer = torch.optim.AdamW(params, **HYPERPARAMETERS, **options)

            def step() -> None:
                for parameter, gradient in zip(params, arrived, strict=False):
                    if cast == "new":
                        parameter.grad = gradient.float()
                    else:
                        parameter.grad.copy_(gradient)
                if cast:
                    torch._foreach_mul_([p.grad for p in params], CLIP)  # as clip_grad_norm_ does
                optimizer.step()
                with torch.no_grad():
                    for parameter, copy in zip(params, streamed, strict=False):
                        copy.copy_(parameter)
                if cast == "new":
                    optimizer.zero_grad()

            return Contestant(name, 28, step)

        return make

    count = sum(torch.Size(shape).numel() for shape in which)

    def copy() -> Contestant:
        source = torch.randn(count)
        target = torch.empty_like(source)
        return Contestant(PLAIN[0], 8, lambda: target.copy_(source))

    def read() -> Contestant:
        source = torch.randn(count)
        return Contestant(PLAIN[1], 4, lambda: source.sum())

    def update() -> Contestant:
        target = torch.randn(count)
        return Contestant(PLAIN[2], 8, lambda: target.mul_(0.999))

    def deepspeed() -> Contestant:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        params = weights()
        for parameter, gradient in zip(params, gradients[torch.float32], strict=True):
            parameter.grad = gradient
        optimizer = DeepSpeedCPUAdam(params, **HYPERPARAMETERS, adamw_mode=True, fp32_optimizer_states=True)
        return Contestant("DeepSpeedCPUAdam, FP32 gradients", 28, lambda: optimizer.step())

    half = torch.bfloat16
    yield from (copy, read, update)
    yield ours("HostAdamW fp32, FP32 gradients", 28, "fp32", "fp32", torch.float32, False)
    yield ours("HostAdamW fp32, BF16 gradients and copy", 28, "fp32", "fp32", half, True)
    yield ours("HostAdamW split, BF16 gradients", 26, "split", "fp32", half, False)
    yield ours("HostAdamW split, moments bf16", 18, "split", "bf16", half, False)
    yield ours("HostAdamW split, moments int8", 14 + 16 / 256, "split", "int8", half, False)
    yield torchs("torch fused, FP32 gradients", fused=True)
    yield torchs(CASTS, cast="new", fused=True)
    yield torchs("torch fused, the same into kept memory", cast="kept", fused=True)
    yield torchs("torch foreach, casts and clip", cast="new", foreach=True)
    try:
        import deepspeed as found

        del found
    except ImportError:
        return
    yield deepspeed


def measure(parameters: int, rounds: int, threads: int, clock: Callable[[], float]) -> tuple[list[tuple[str, float, list[float]]], int]:
    """Seconds of every round by contestant, with the bytes each needs, and the exact number of parameters.

    Memory holds all contestants at once, about 120 bytes a parameter.
    """
    which = shapes(parameters)
    count = sum(torch.Size(s).numel() for s in which)
    field = [make() for make in contestants(which, threads)]
    for contestant in field:
        contestant.step()  # touches the memory, builds what is built lazily
    gc.disable()
    times: dict[str, list[float]] = {contestant.name: [] for contestant in field}
    for _ in tqdm(range(rounds), desc="rounds"):
        for contestant in field:
            begin = clock()
            contestant.step()
            times[contestant.name].append(clock() - begin)
    gc.enable()
    return [(c.name, c.bytes * count, times[c.name]) for c in field], count


def report(results: list[tuple[str, float, list[float]]], count: int, tensors: int, threads: int, command: str) -> str:
    """The table, with what it was measured on."""
    copy_rate = [results[0][1] / t for t in results[0][2]]
    by_name = {name: times for name, _, times in results}
    casts = by_name[CASTS]
    lines = [
        "# Host optimizer",
        "",
        f"`{command}` on {cpu_name()}, {threads} threads, torch {torch.__version__}, {date()}.",
        f"{count:,} parameters in {tensors} tensors. Medians of {len(casts)} interleaved rounds; load average {os.getloadavg()[0]:.1f}.",
        "",
        "| step | ms | GB/s needed | share of the copy's rate | times as fast as torch fused with casts |",
        "|---|---|---|---|---|",
    ]
    for name, needed, times in results:
        share = statistics.median(needed / t / rate for t, rate in zip(times, copy_rate, strict=True))
        faster = statistics.median(theirs / t for t, theirs in zip(times, casts, strict=True))
        ms, rate = statistics.median(times) * 1e3, statistics.median(needed / t for t in times) / 1e9
        lines.append(f"| {name} | {ms:.1f} | {rate:.1f} | {share:.2f} | {'' if name in PLAIN else f'{faster:.2f}'} |")
    deepspeed = by_name.get("DeepSpeedCPUAdam, FP32 gradients")
    ours = by_name["HostAdamW fp32, FP32 gradients"]
    if deepspeed is None:
        lines += ["", "DeepSpeedCPUAdam: not installed, not measured."]
    else:
        ratio = statistics.median(theirs / t for t, theirs in zip(ours, deepspeed, strict=True))
        lines += ["", f"HostAdamW is {ratio:.2f} times as fast as DeepSpeedCPUAdam at the same job (FP32 gradients, no copy)."]
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    """The processor as the system calls it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def date() -> str:
    """Today, as a file should say it."""
    return time.strftime("%Y-%m-%d")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=100_000_000, help="about how many, e.g. 1e8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="time passed, or time on a processor, which says more on a busy machine (with --threads 1: waiting threads count as working)",
    )
    parser.add_argument("--output", type=Path, help="also write the table there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    results, count = measure(options.parameters, options.rounds, options.threads, clock)
    command = f"python benchmarks/host_optimizer.py --parameters {options.parameters:.0e} --rounds {options.rounds} "
    command += f"--threads {options.threads} --clock {options.clock}"
    text = report(results, count, len(shapes(options.parameters)), options.threads, command)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
