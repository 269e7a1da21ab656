"""Time of a training step: plain, plain with activation checkpointing, and streamed; interleaved in one process.

    python benchmarks/step_time.py --parameters 60e6 --precision bf16-mixed

Each round times one step of every contender, in turning order, so that what else the machine does falls on all alike. The figure to read
is the median over rounds of each contender's time divided by plain's in the same round.

FLOPs of a step, by which TFLOP/s is stated: 6 x parameters without embeddings x tokens + 12 x layers x width x sequence x tokens
(attention), for every contender alike: recomputing is not counted as work done.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megatrain.engine import Engine
from lightning_megatrain.engine.report import report

VOCABULARY = 2048


def build(width: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def layers_for(parameters: float, width: int) -> int:
    per_layer = 4 * width**2 + 3 * width * (width * 8 // 3 // 64 * 64)
    return max(1, round((parameters - 2 * VOCABULARY * width) / per_layer))


class Contender:
    """One way to run the same step."""

    def __init__(self, name: str, model: LlamaForCausalLM, device: torch.device, precision: str) -> None:
        self.name, self.model, self.device, self.precision = name, model, device, precision
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: torch.Tensor) -> None:
        wait: Callable[[], None] = torch.accelerator.synchronize if self.device.type != "cpu" else lambda: None
        wait()
        start = time.perf_counter()
        casts = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False) if self.precision == "bf16-mixed" else nullcontext()
        with casts:
            loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        wait()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=60e6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", help="contenders to run; a model that does not fit on the device leaves out the plain ones")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    layers = layers_for(arguments.parameters, arguments.width)

    def contender(name: str) -> Contender:
        model = build(arguments.width, layers)
        if name == "plain with checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if name != "megatrain":
            model.to(device)
        model.train()
        return Contender(name, model, device, arguments.precision)

    names = arguments.only or ["plain", "plain with checkpointing", "megatrain"]
    contenders = [contender(name) for name in names]
    streamed = next((c for c in contenders if c.name == "megatrain"), None)
    engine = Engine(streamed.model, device) if streamed else None
    batches = torch.randint(VOCABULARY, (arguments.rounds + 2, arguments.batch, arguments.sequence)).to(device)
    for number, tokens in enumerate(batches):
        for index in range(len(contenders)):
            contenders[(index + number) % len(contenders)].step(tokens)
        if number == 1:  # two rounds to warm up
            for one in contenders:
                one.seconds.clear()

    model = contenders[0].model
    parameters = sum(p.numel() for p in model.parameters())
    tokens = arguments.batch * arguments.sequence
    work = 6 * (parameters - VOCABULARY * arguments.width) * tokens + 12 * layers * arguments.width * arguments.sequence * tokens
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, {threads} threads"
    print(
        f"{date.today()}, torch {torch.__version__}, {where}; {parameters / 1e6:.1f} M parameters, {layers} layers of width "
        f"{arguments.width}, batch {arguments.batch} x {arguments.sequence}, {arguments.precision}, fused AdamW, {arguments.rounds} rounds"
    )
    print("\n| | median s | of plain | of checkpointing | tokens/s | TFLOP/s | losses as plain |")
    print("|---|---|---|---|---|---|---|")
    by_name = {one.name: one for one in contenders}
    for one in contenders:
        median = statistics.median(one.seconds)

        def against(other: str, one: Contender = one) -> str:
            if other not in by_name:
                return "-"
            return f"{statistics.median(a / b for a, b in zip(one.seconds, by_name[other].seconds, strict=True)):.3f}"

        same = "-" if "plain" not in by_name else "yes" if one.losses == by_name["plain"].losses else "no"
        print(
            f"| {one.name} | {median:.3f} | {against('plain')} | {against('plain with checkpointing')} | {tokens / median:.0f} | "
            f"{work / median / 1e12:.3f} | {same} |"
        )
    if engine is not None and streamed is not None:
        print("\n```\n" + report(engine, [streamed.optimizer]) + "\n```")
        engine.close()


if __name__ == "__main__":
    main()
