"""How the strategy is named: by string, as an object, on the command line and in YAML."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatrain import MegaTrainStrategy
from tests.strategy.subject import Subject
from tests.trainers import quiet_trainer

CLASS = "lightning_megatrain.MegaTrainStrategy"


def parsed(tmp_path: Path, strategy: Any = None, *arguments: str) -> Any:
    """The Trainer's strategy after LightningCLI has read a config file with `strategy` and `arguments`."""
    config = tmp_path / "config.yaml"
    trainer: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    config.write_text(yaml.safe_dump({"trainer": trainer | ({} if strategy is None else {"strategy": strategy})}))
    cli = LightningCLI(
        Subject, args=["--config", str(config), *arguments], run=False, save_config_callback=None, seed_everything_default=False
    )
    return cli.trainer.strategy


def test_by_string() -> None:
    trainer = quiet_trainer(accelerator="cpu", strategy="megatrain")
    assert type(trainer.strategy) is MegaTrainStrategy


def test_the_trainer_lowers_the_name() -> None:
    assert type(quiet_trainer(accelerator="cpu", strategy="MegaTrain").strategy) is MegaTrainStrategy


def test_as_an_object() -> None:
    strategy = MegaTrainStrategy(slots=3)
    assert quiet_trainer(accelerator="cpu", strategy=strategy).strategy is strategy


def test_by_the_trainers_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "megatrain")
    assert type(quiet_trainer(accelerator="cpu").strategy) is MegaTrainStrategy


def test_it_is_listed_with_a_description() -> None:
    assert "megatrain" in StrategyRegistry.available_strategies()
    assert StrategyRegistry["megatrain"]["description"]


def test_importing_the_package_is_all_that_registers_it() -> None:
    code = (
        "import lightning as L\n"
        "try: L.Trainer(accelerator='cpu', strategy='megatrain', logger=False)\n"
        "except ValueError: print('unknown before')\n"
        "import lightning_megatrain\n"
        "print(type(L.Trainer(accelerator='cpu', strategy='megatrain', logger=False).strategy).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-3:-1] == ["unknown before", "MegaTrainStrategy"]


def test_yaml_class_path_with_arguments(tmp_path: Path) -> None:
    given = {"layers": ["Block"], "resident": ["net.blocks.0"], "slots": 3, "staging_buffers": 1, "stream_casts": False}
    strategy = parsed(tmp_path, {"class_path": CLASS, "init_args": given | {"fused_optimizer": False}})
    assert given.items() <= strategy._engine_options.items()
    assert strategy.fused_optimizer is False


def test_yaml_class_path_without_arguments(tmp_path: Path) -> None:
    assert type(parsed(tmp_path, {"class_path": CLASS})) is MegaTrainStrategy


def test_yaml_short_class_path(tmp_path: Path) -> None:
    assert type(parsed(tmp_path, {"class_path": "MegaTrainStrategy"})) is MegaTrainStrategy


def test_yaml_string(tmp_path: Path) -> None:
    assert type(parsed(tmp_path, "megatrain")) is MegaTrainStrategy


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        (["--trainer.strategy=megatrain"], 2),
        (["--trainer.strategy.class_path=MegaTrainStrategy"], 2),
        ([f"--trainer.strategy.class_path={CLASS}", "--trainer.strategy.init_args.slots=4"], 4),
        ([f"--trainer.strategy={CLASS}", "--trainer.strategy.slots=4"], 4),
    ],
)
def test_command_line(tmp_path: Path, arguments: list[str], slots: int) -> None:
    strategy = parsed(tmp_path, None, *arguments)
    assert type(strategy) is MegaTrainStrategy
    assert strategy._engine_options["slots"] == slots


def test_command_line_over_yaml(tmp_path: Path) -> None:
    config = {"class_path": CLASS, "init_args": {"slots": 3, "fused_optimizer": False}}
    strategy = parsed(tmp_path, config, "--trainer.strategy.slots=5")
    assert (strategy._engine_options["slots"], strategy.fused_optimizer) == (5, False)
    assert type(parsed(tmp_path, config, "--trainer.strategy=auto")) is not MegaTrainStrategy


def test_an_unknown_argument_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(tmp_path, {"class_path": CLASS, "init_args": {"bogus": 1}})
    assert "bogus" in capsys.readouterr().err


def test_the_config_is_written_and_read_again(tmp_path: Path) -> None:
    """A run's config file is written from the arguments: they must be plain YAML."""
    config = tmp_path / "config.yaml"
    strategy = {"class_path": CLASS, "init_args": {"layers": ["Block"], "slots": 3}}
    config.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "logger": False, "strategy": strategy}}))
    cli = LightningCLI(Subject, args=["--config", str(config)], run=False, seed_everything_default=False)
    written = yaml.safe_load(cli.parser.dump(cli.config))["trainer"]["strategy"]
    assert written["class_path"] == CLASS
    assert {key: written["init_args"][key] for key in ("layers", "slots")} == {"layers": ["Block"], "slots": 3}
    again = parsed(tmp_path, written)
    assert again._engine_options["layers"] == ["Block"]


def test_a_precision_given_to_the_trainer_reaches_a_strategy_object() -> None:
    trainer = quiet_trainer(accelerator="cpu", strategy=MegaTrainStrategy(), precision="bf16-mixed")
    assert trainer.precision == "bf16-mixed"


def test_it_runs_in_a_notebook() -> None:
    """No launcher: one that starts processes makes the Trainer refuse an interactive session."""
    assert quiet_trainer(accelerator="cpu", strategy="megatrain").strategy.launcher is None
