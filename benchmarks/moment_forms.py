"""What moments in BF16 and in one byte do to training: the model and data of `examples/demo.py`, 500 steps of each form.

    python benchmarks/moment_forms.py --steps 500 --seeds 1 2 3 --output benchmarks/results

Runs of one seed differ in the form alone: they start from the same weights and see the same batches. The first form of the table is that of
`torch.optim.AdamW`, whole weights and FP32 moments. What is compared is the loss over all label tokens of the held-out documents after the
last step, and the mean training loss of the last 50 steps. The spread between seeds says what a difference means.

The model computes in FP32, as the demo does, in plain Lightning, whose numbers are those of the strategy and which computes no layer twice.
`--masters split` trains in bf16-mixed under the strategy instead, where weights may be held in two halves.
"""

import argparse
import importlib.util
import os
import platform
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import matplotlib as mpl
import torch
import yaml
from typing_extensions import override

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.datamodules import MixtureDataModule
from lightning_megatrain.language_model import CausalLM

mpl.use("Agg")
import matplotlib.pyplot as plt

EXAMPLES = Path(__file__).parents[1] / "examples"
FORMS = {  # masters, moments
    "fp32": [("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "int8")],
    "split": [("fp32", "fp32"), ("split", "fp32"), ("split", "bf16"), ("split", "int8")],
}
LAST = 50  # steps


@dataclass
class Run:
    """What one training gave: the training loss of each step (mean of its label tokens), and the held-out loss after the last."""

    losses: list[float] = field(default_factory=list)
    held_out: float = 0.0

    @property
    def last(self) -> float:
        """The mean training loss of the last steps."""
        return statistics.mean(self.losses[-LAST:])


class Record(L.Callback):
    """Writes down the training loss of each step."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run.losses.append(float(outputs["sample_losses"].sum() / outputs["sample_tokens"].sum()))


def demo() -> ModuleType:
    """`examples/demo.py`, which is a script."""
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(config: dict[str, Any], folder: Path, precision: Any, seed: int, steps: int, masters: Any, moments: str) -> Run:
    """One training of the demo's model with HostAdamW; nothing else of its config is changed."""
    L.seed_everything(seed, verbose=False)
    run = Run()
    data = config["data"]["init_args"] | {"cache_dir": str(folder / "cache"), "domains": {}}
    for name, domain in config["data"]["init_args"]["domains"].items():
        data["domains"][name] = domain | {"files": str(folder / "data" / f"{name}.jsonl")}
    model = CausalLM(
        **config["model"]["init_args"],
        optimizer="lightning_megatrain.optim.HostAdamW",
        optimizer_args={"masters": masters, "moments": moments},
    )
    trainer = L.Trainer(
        strategy=MegaTrainStrategy(masters=masters) if precision == "bf16-mixed" else "auto",
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_steps=steps,
        gradient_clip_val=config["trainer"]["gradient_clip_val"],
        callbacks=[Record(run)],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    datamodule = MixtureDataModule(**data)
    trainer.fit(model, datamodule)
    trainer.limit_val_batches = 1.0
    run.held_out = trainer.validate(model, datamodule, verbose=False)[0]["val_loss"]
    return run


def report(runs: dict[tuple[str, str], list[Run]], command: str, minutes: float) -> list[str]:
    """The table: each form's losses, and its difference from the first form's at the same seed."""
    reference = next(iter(runs.values()))
    held_out = [run.held_out for run in reference]
    spread = (max(held_out) - min(held_out)) / statistics.mean(held_out)
    lines = [
        "# Loss after training with smaller moments",
        "",
        f"`{command}` on {platform.machine()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; {minutes:.0f} minutes, "
        f"load average {os.getloadavg()[0]:.1f}. The model, data and settings of `examples/demo.yaml`, {len(reference[0].losses)} steps.",
        "",
        "Mean over seeds, and each seed's difference from whole weights with FP32 moments (wanted: within 1 %).",
        "",
        f"| masters | moments | held-out loss | difference, by seed | training loss, last {LAST} steps | difference, by seed |",
        "|---|---|---|---|---|---|",
    ]
    for (masters, moments), of_form in runs.items():
        cells = [masters, moments]
        for value in (lambda run: run.held_out, lambda run: run.last):
            apart = ", ".join(f"{value(run) / value(other) - 1:+.2%}" for run, other in zip(of_form, reference, strict=True))
            cells += [f"{statistics.mean(map(value, of_form)):.4f}", "" if of_form is reference else apart]
        lines.append(f"| {' | '.join(cells)} |")
    if len(reference) > 1:
        lines += ["", f"The seeds themselves lie {spread:.2%} apart in held-out loss."]
    return [*lines, "", "![Training loss](moment_forms.png)"]


def draw(runs: dict[tuple[str, str], list[Run]], file: Path) -> None:
    """Training loss over steps of the first seed, and each form's difference from the first, both smoothed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    reference = smooth(next(iter(runs.values()))[0].losses)
    for (masters, moments), of_form in runs.items():
        curve = smooth(of_form[0].losses)
        left.plot(curve, label=f"{masters} masters, {moments} moments", linewidth=1)
        right.plot([100 * (a / b - 1) for a, b in zip(curve, reference, strict=True)], linewidth=1)
    left.set(title="training loss, mean of 20 steps", xlabel="step", yscale="log")
    left.legend()
    right.set(title="difference from FP32, %", xlabel="step", ylim=(-2, 2))
    right.axhspan(-1, 1, alpha=0.1)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def smooth(losses: list[float], width: int = 20) -> list[float]:
    """Means of the last steps."""
    return [statistics.mean(losses[max(0, i + 1 - width) : i + 1]) for i in range(len(losses))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--masters", choices=list(FORMS), default="fp32")
    parser.add_argument("--output", type=Path, help="also write the table and the figure there")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    config = yaml.safe_load((EXAMPLES / "demo.yaml").read_text())
    forms, precision = FORMS[options.masters], "bf16-mixed" if options.masters == "split" else "32-true"
    runs: dict[tuple[str, str], list[Run]] = {form: [] for form in forms}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        demo().write_data(Path(folder) / "data")
        for seed in options.seeds:
            for form in forms:
                run = train(config, Path(folder), precision, seed, options.steps, *form)
                runs[form].append(run)
                print(f"seed {seed}, {form[0]} masters, {form[1]} moments: held out {run.held_out:.4f}, last {run.last:.4f}", flush=True)
    seeds = " ".join(map(str, options.seeds))
    command = f"python benchmarks/moment_forms.py --steps {options.steps} --seeds {seeds} --masters {options.masters}"
    text = "\n".join(report(runs, command, (time.monotonic() - start) / 60)) + "\n"
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "moment_forms.md").write_text(text)
        draw(runs, options.output / "moment_forms.png")


if __name__ == "__main__":
    main()
