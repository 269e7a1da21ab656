"""`lightning-megatrain doremi`: reference, proxy and final model of DoReMi, one after the other."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from lightning_megatrain.callbacks import DoReMi
from lightning_megatrain.callbacks.mixture.doremi import write_shares
from lightning_megatrain.datamodules.shares import check_weights
from lightning_megatrain.language_model.hugging_face_models import with_fields
from lightning_megatrain.language_model.model_section import describe_model


def main(arguments: Sequence[str]) -> None:
    """Run the three stages (arXiv 2305.10429); one whose result is in the output folder already is skipped.

    A `dirpath` of the config's callbacks gets a folder for each stage, so that `ckpt_path: last` resumes a stage that was stopped.

    Args:
        arguments: As on the command line.
    """
    # Here, as the command line imports this module only when it is asked for.
    from lightning_megatrain.cli import MegaTrainCLI

    parser = argparse.ArgumentParser("lightning-megatrain doremi", description=__doc__)
    parser.add_argument(
        "-c", "--config", action="append", required=True, help="config of the final model, as for `fit`; may be given again"
    )
    parser.add_argument(
        "--proxy", action="append", default=[], help="config on top of it for reference and proxy: a smaller model, fewer steps"
    )
    parser.add_argument(
        "--proxy.FIELD",
        action="store_true",
        help="a field of their model's config: --proxy.num_hidden_layers 4",
    )
    parser.add_argument("--output", type=Path, default=Path("doremi_run"), help="folder for the results (default: %(default)s)")
    parser.add_argument("--step-size", type=float, default=1.0, help="eta (default: %(default)s)")
    parser.add_argument("--smoothing", type=float, default=1e-3, help="c (default: %(default)s)")
    options, others = parser.parse_known_args(arguments)
    smaller = _fields(parser, others)
    reference, shares, final = (options.output / name for name in ("reference.ckpt", "shares.json", "final.ckpt"))
    try:  # before any time is spent
        DoReMi("reference", step_size=options.step_size, smoothing=options.smoothing)
        options.output.mkdir(parents=True, exist_ok=True)
        if shares.exists():
            _read_shares(shares)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    def fit(stage: str, proxy: bool, *callback: str) -> MegaTrainCLI:
        print(f"\nDoReMi: {stage}", flush=True)
        configs = [*options.config, *(options.proxy if proxy else [])]
        where = f"--trainer.default_root_dir={options.output / stage}"

        class Stage(MegaTrainCLI):
            @override
            def before_instantiate_classes(self) -> None:
                _keep_apart(self.config["fit"], stage)
                if proxy and smaller:
                    _change(self.config["fit"]["model"], smaller)

        return Stage(args=["fit", *(part for config in configs for part in ("-c", config)), where, *callback])

    if not reference.exists():
        fit("reference", True).trainer.save_checkpoint(reference, weights_only=True)
    if not shares.exists():
        cli = fit(
            "proxy",
            True,
            "--trainer.callbacks+=DoReMi",
            f"--trainer.callbacks.reference={reference}",
            f"--trainer.callbacks.step_size={options.step_size}",
            f"--trainer.callbacks.smoothing={options.smoothing}",
        )
        (policy,) = (c for c in cli.trainer.callbacks if isinstance(c, DoReMi))  # type: ignore[attr-defined]
        if not policy.updates:
            parser.exit(
                1,
                f"{parser.prog}: error: the proxy ended after {cli.trainer.global_step} steps without an update of the shares, which "
                "begin after the first step: give it more steps, with `max_steps` in a `--proxy` config.\n",
            )
        if cli.trainer.is_global_zero:
            write_shares(shares, policy.average_shares)
        cli.trainer.strategy.barrier()
    print(f"\nDoReMi: shares {json.dumps(_read_shares(shares))}", flush=True)
    if not final.exists():
        fit("final", False, "--trainer.callbacks+=StaticMixture", f"--trainer.callbacks.proportions={shares}").trainer.save_checkpoint(
            final
        )


def _read_shares(file: Path) -> dict[str, float]:
    try:
        shares = json.loads(file.read_text())
        check_weights("shares", shares)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} holds no shares of domains ({error}). Delete it, and the proxy trains again.") from error
    return dict(shares)


def _keep_apart(config: Any, stage: str) -> None:
    """Give each stage its own folder for checkpoints, so that none goes on from another's."""
    if config.get("ckpt_path") not in (None, "last"):
        raise ValueError(
            f"`ckpt_path` {config['ckpt_path']} would be loaded into reference, proxy and final model alike: leave it out, or set it to "
            '"last" beside a ModelCheckpoint with a `dirpath`, which has a folder for each stage.'
        )
    callbacks = config["trainer"].get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        arguments = callback.get("init_args") or {}
        if arguments.get("dirpath") is not None:
            arguments["dirpath"] = str(Path(arguments["dirpath"]) / stage)


def _fields(parser: argparse.ArgumentParser, arguments: list[str]) -> dict[str, Any]:
    """Read `--proxy.FIELD VALUE` and `--proxy.FIELD=VALUE`."""
    parts = [part for argument in arguments for part in (argument.split("=", 1) if argument.startswith("--") else [argument])]
    names, values = parts[::2], parts[1::2]
    unknown = [name for name in names if not name.startswith("--proxy.")]
    if unknown or len(names) != len(values):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" if unknown else f"{names[-1]} needs a value")
    return {name.removeprefix("--proxy."): yaml.safe_load(value) for name, value in zip(names, values, strict=True)}


def _change(model: Any, fields: dict[str, Any]) -> None:
    """Put other fields into the model's config, whose weights are then random."""
    described = describe_model(model)
    if described is None:
        raise ValueError(
            f"--proxy.{next(iter(fields))} changes the config of a CausalLM, but the model is {model.get('class_path')}: give "
            "`--proxy config.yaml` with a smaller one."
        )
    model["init_args"]["model"] = with_fields(described, fields)
