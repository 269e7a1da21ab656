"""`lightning-megatrain doremi`: reference, proxy and final model of DoReMi, one after the other."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lightning_megatrain.callbacks import DoReMi


def main(arguments: Sequence[str]) -> None:
    """Run the three stages (arXiv 2305.10429); one whose result is in the output folder already is skipped.

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
    parser.add_argument("--output", type=Path, default=Path("doremi_run"), help="folder for the results (default: %(default)s)")
    parser.add_argument("--step-size", type=float, default=1.0, help="eta (default: %(default)s)")
    parser.add_argument("--smoothing", type=float, default=1e-3, help="c (default: %(default)s)")
    options = parser.parse_args(arguments)
    reference, shares, final = (options.output / name for name in ("reference.ckpt", "shares.json", "final.ckpt"))
    options.output.mkdir(parents=True, exist_ok=True)

    def fit(stage: str, proxy: bool, *callback: str) -> MegaTrainCLI:
        print(f"\nDoReMi: {stage}", flush=True)
        configs = [*options.config, *(options.proxy if proxy else [])]
        where = f"--trainer.default_root_dir={options.output / stage}"
        return MegaTrainCLI(args=["fit", *(part for config in configs for part in ("-c", config)), where, *callback])

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
        if cli.trainer.is_global_zero:
            shares.write_text(json.dumps(policy.average_shares, indent=2) + "\n")
        cli.trainer.strategy.barrier()
    print(f"\nDoReMi: shares {shares.read_text()}", flush=True)
    if not final.exists():
        fit("final", False, "--trainer.callbacks+=StaticMixture", f"--trainer.callbacks.proportions={shares}").trainer.save_checkpoint(
            final
        )
