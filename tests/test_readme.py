"""What the README shows is run."""

import re
from pathlib import Path

import pytest
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn, optim, rand
from torch.utils.data import DataLoader

from lightning_megatrain.cli import COMMANDS, MegaTrainCLI, main

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    """The README's fenced blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)


class FourBlocks(LightningModule):
    """Stands for the reader's own model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.blocks(batch) - batch).square().mean()

    def compute_sample_losses(self, batch: Tensor) -> Tensor:
        return (self.blocks(batch) - batch).square().mean(1)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.AdamW(self.parameters(), lr=1e-2)


class RandomVectors(LightningDataModule):
    """Stands for the reader's own data."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(rand(8, 8), batch_size=4)


@pytest.mark.parametrize("program", blocks("python"))
def test_python_blocks_train_the_readers_model(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "cpu")
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "2")
    model = FourBlocks()
    before = model.blocks[0][0].weight.detach().clone()

    names = {"model": model, "datamodule": RandomVectors()}
    exec(compile(program, README.name, "exec"), names)

    assert names["trainer"].global_step == 2
    assert not model.blocks[0][0].weight.equal(before)


@pytest.mark.parametrize("config", blocks("yaml"))
def test_yaml_blocks_are_configs_the_command_takes(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config)

    with pytest.raises(SystemExit) as end:
        main(["fit", "-c", str(path), "--print_config"])

    assert end.value.code == 0
    assert "lightning_megatrain.language_model.CausalLM" in capsys.readouterr().out


def test_subcommands_exist() -> None:
    shown = re.findall(r"^lightning-megatrain ([\w-]+)", "\n".join(blocks("bash")), flags=re.MULTILINE)
    assert shown
    assert set(shown) <= set(MegaTrainCLI.subcommands()) | set(COMMANDS)


def test_make_targets_exist() -> None:
    commands = "\n".join(blocks("bash") + re.findall(r"`(make [^`]+)`", README.read_text()))
    shown = set(re.findall(r"\bmake (?:PYTHON=\S+ )?([a-z-]+)", commands))
    offered = set(re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= shown <= offered


def test_extras_exist() -> None:
    shown = set(re.findall(r"lightning-megatrain\[(\w+)\]", README.read_text()))
    offered = (README.parent / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert shown
    assert shown <= set(re.findall(r"^(\w+) = \[", offered, flags=re.MULTILINE))


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert [link for link in links if not (README.parent / link).exists()] == []
