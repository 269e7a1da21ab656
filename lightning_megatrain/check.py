"""`lightning-megatrain check`: does a model of yours train the same streamed as plain?"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning import seed_everything
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_megatrain.engine.passes import current_pass
from lightning_megatrain.language_model.hugging_face_models import LAYER_COUNTS, with_fields
from lightning_megatrain.language_model.model_section import describe_model
from lightning_megatrain.strategy import MegaTrainStrategy

STEPS = 2
LAYERS_WHEN_SHRUNK = 2
TOLERANCE = 1e-6
"""Relative difference up to which two runs agree, where kernels of an accelerator need not repeat bit for bit."""


@dataclass
class Record:
    """What a run of a few steps did."""

    losses: list[float] = field(default_factory=list)
    outputs: dict[str, float] = field(default_factory=dict)
    """A checksum of what each module returned in the first forward, by path, in the order in which they returned."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


class Recorder(Callback):
    """Records a run; keeps a copy of every gradient of every step on the host."""

    def __init__(self) -> None:
        self.record = Record()
        self._handles: list[Any] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, module in pl_module.named_modules():
            if name:
                self._handles.append(module.register_forward_hook(self._recording(name)))

    def _recording(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name not in self.record.outputs and current_pass() != "recompute":
                tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
                self.record.outputs[name] = sum(float(tensor.detach().double().abs().sum()) for tensor in tensors)

        return hook

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        grads = {name: p.grad.detach().cpu().clone() for name, p in pl_module.named_parameters() if p.grad is not None}
        self.record.gradients.append(grads)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self.record.losses.append(float(loss))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.parameters = {name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()}


def compare(plain: Record, streamed: Record) -> tuple[bool, str]:
    """Compares two runs.

    Returns:
        Whether they agree within `TOLERANCE`, and a few lines that say how far, and where they part.
    """
    lines, agree = [], True
    for number, (a, b) in enumerate(zip(plain.losses, streamed.losses, strict=True)):
        agree &= _close(a, b)
        lines.append(f"loss {number + 1}:      plain {a:.9g}, streamed {b:.9g}{'' if _same(a, b) else '   <-- differ'}")
    for number, (before, after) in enumerate(zip(plain.gradients, streamed.gradients, strict=True)):
        text, close, _ = _compared(before, after)
        agree &= close
        lines.append(f"gradients {number + 1}: {text}")
    text, close, _ = _compared(plain.parameters, streamed.parameters)
    agree &= close
    lines.append(f"parameters:  {text}")
    lines.append(_where_they_part(plain, streamed))
    if not all(map(math.isfinite, plain.losses)):
        lines.append("The loss is not finite in plain training either.")
    return agree, "\n".join(line for line in lines if line)


def _where_they_part(plain: Record, streamed: Record) -> str:
    for name, value in plain.outputs.items():
        if name in streamed.outputs and not _same(value, streamed.outputs[name]):
            checksums = f"checksums {value:.9g} and {streamed.outputs[name]:.9g}"
            return f"They part in the forward of {name!r} ({checksums}); everything before it agrees."
    for before, after in zip(plain.gradients, streamed.gradients, strict=True):
        different = _compared(before, after)[2]
        if different:
            # backward runs from the last module to the first, so the last parameter that differs is where it began
            owner, _, parameter = different[-1].rpartition(".")
            return f"Every forward agrees. They part in the backward of {owner!r}, at the gradient of its {parameter!r}."
    return ""


def _compared(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[str, bool, list[str]]:
    """A summary, whether all are close, and the names that are not equal bit for bit."""
    missing = sorted(before.keys() ^ after.keys())
    different = [name for name in before if name in after and not _equal(before[name], after[name])]
    largest = max((_relative(before[name], after[name]) for name in different), default=0.0)
    text = f"{len(before) - len(different)} of {len(before)} equal bit for bit"
    if different:
        text += f"; largest relative difference {largest:.1e}, in {max(different, key=lambda name: _relative(before[name], after[name]))!r}"
    if missing:
        text += f"; only one of the runs has {missing[0]!r}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
    return text, not missing and largest <= TOLERANCE, [name for name in before if name in different or name in missing]


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-30))


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, or not a number in the same places."""
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _close(a: float, b: float) -> bool:
    return _same(a, b) or abs(a - b) <= TOLERANCE * max(abs(a), abs(b))


def _run(arguments: Sequence[str], strategy: str) -> Record:
    """Trains a few steps from a config, without its callbacks, loggers and checkpoints."""
    from lightning_megatrain.cli import MegaTrainCLI  # the command line imports this module

    recorder = Recorder()

    class Short(MegaTrainCLI):
        @override
        def before_instantiate_classes(self) -> None:
            trainer = self.config["trainer"]
            steps = STEPS * (trainer["accumulate_grad_batches"] or 1)
            short = {"max_steps": STEPS, "max_epochs": -1, "limit_train_batches": steps, "limit_val_batches": 0, "num_sanity_val_steps": 0}
            quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
            for key, value in {**short, **quiet, "callbacks": None, "devices": 1, "fast_dev_run": False}.items():
                trainer[key] = value
            if strategy == "auto":
                trainer["strategy"] = "auto"
            _shrink(self.config["model"])

    cli = Short(args=list(arguments), run=False, save_config_callback=None, seed_everything_default=0)
    seed_everything(cli.config["seed_everything"] if isinstance(cli.config["seed_everything"], int) else 0, verbose=False)
    if strategy != "auto":
        if not isinstance(cli.trainer.strategy, MegaTrainStrategy):
            name = type(cli.trainer.strategy).__name__
            raise SystemExit(f"The config trains with {name}; `check` compares plain training with `strategy: megatrain`.")
        streamed = cli.trainer.strategy
        streamed.fused_optimizer = False  # the fused kernel may differ in the last bit; that is no fault to look for here
        streamed.masters = "fp32"  # the upper half of a weight rounds ties up
        streamed.overlap_optimizer = streamed.transient_gradients = False  # every gradient is looked at
    cli.trainer.callbacks.append(recorder)  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, cli.datamodule)
    return recorder.record


def _shrink(model: Any) -> None:
    """Leaves a model that is described by its config a few layers, a pretrained `CausalLM` too; any other is run as it is."""
    arguments = model.get("init_args") or model
    described = describe_model(model) or arguments.get("model")
    for key in LAYER_COUNTS if isinstance(described, dict) else ():
        layers = described.get(key)
        if isinstance(layers, int) and layers > LAYERS_WHEN_SHRUNK:
            print(f"The model is shrunk from {key}={layers} to {LAYERS_WHEN_SHRUNK}, with random weights.")
            arguments["model"] = with_fields(described, {key: LAYERS_WHEN_SHRUNK})
            return


def main(arguments: Sequence[str]) -> None:
    """Runs two steps of a config's model plain and streamed, prints whether they agree, and exits with 1 if they do not.

    Args:
        arguments: Those of `lightning-megatrain fit`, such as ``-c config.yaml``.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: lightning-megatrain check -c config.yaml [any option of `fit`]\n\n" + (main.__doc__ or "").split("\n")[0])
        return
    agree, text = compare(_run(arguments, "auto"), _run(arguments, "megatrain"))
    print(text)
    print("Streamed and plain training agree." if agree else "Streamed and plain training do NOT agree.")
    if not agree:
        sys.exit(1)
