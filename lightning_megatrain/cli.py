"""The `lightning-megatrain` command.

`fit`, `validate`, `test` and `predict` are a LightningCLI over any LightningModule and DataModule; this package is imported before its
arguments are parsed, so its classes go by their short names (`class_path: CausalLM`). `export` is a command of its own.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

import lightning_megatrain  # noqa: F401  (registers the strategy)
import lightning_megatrain.callbacks  # noqa: F401  (short names)
import lightning_megatrain.datamodules  # noqa: F401
import lightning_megatrain.language_model  # noqa: F401

# What is no Trainer method: the module whose `main(arguments)` runs, and its line in the help.
COMMANDS = {
    "check": ("lightning_megatrain.check", "train two steps plain and streamed, and say whether they agree"),
    "doremi": ("lightning_megatrain.doremi", "learn the shares of domains with a small model and train with them"),
    "export": ("lightning_megatrain.export", "write a checkpoint as a folder that transformers loads"),
}


class MegaTrainCLI(LightningCLI):
    """A LightningCLI whose Trainer trains with `strategy: megatrain` unless told otherwise.

    A config in which one mapping has a key twice is refused: YAML would keep the last and forget the first. The config file
    of a run is written to its log folder, over that of an earlier run.
    """

    def __init__(self, args: ArgsType = None, **kwargs: Any) -> None:
        defaults = {"strategy": "megatrain"} if "megatrain" in StrategyRegistry else {}
        others = ", ".join(f"{name} ({line})" for name, (_, line) in COMMANDS.items())
        kwargs = {
            "trainer_defaults": defaults,
            "save_config_kwargs": {"overwrite": True},
            "parser_kwargs": {
                "prog": "lightning-megatrain",
                "description": f"Train, validate, test and predict from a config file. Further commands: {others}.",
            },
            **kwargs,
        }
        super().__init__(args=args, **kwargs)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        with _each_key_once(), warnings.catch_warnings():
            # `check` and `doremi` give arguments of their own while those of the process are there too
            warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended")
            super().parse_arguments(parser, args)

    @override
    def _parse_ckpt_path(self) -> None:
        # Lightning reads the whole checkpoint here, to put its hyperparameters over those of the config. The config is what counts.
        pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: As on the command line. None: those of this process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # for classes of the user's own; a console script does not look there
    if given and given[0] in COMMANDS:
        importlib.import_module(COMMANDS[given[0]][0]).main(given[1:])
    else:
        MegaTrainCLI(args=arguments if arguments is None else given)


@contextmanager
def _each_key_once() -> Iterator[None]:
    """Let jsonargparse refuse YAML in which a mapping has a key twice."""
    load = get_loader("yaml")

    def load_checked(text: str) -> Any:
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        return load(text)

    set_loader("yaml", load_checked, (yaml.YAMLError,))
    try:
        yield
    finally:
        set_loader("yaml", load, (yaml.YAMLError,))


def _check_keys(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.value != "<<":
                    raise yaml.YAMLError(f"The key {key.value!r} is given twice, the second time in line {key.start_mark.line + 1}.")
                seen.add(key.value)
            _check_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item)
