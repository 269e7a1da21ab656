"""What every test starts from: one thread, no network, a fixed seed, and an empty working folder."""

import gc
import os

# Set before torch or a Hugging Face library is imported, which read them once.
os.environ["OMP_NUM_THREADS"] = "1"  # sums in one order, and quick: a second thread costs more than it brings on models this small
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "Agg")

import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(1)

# The same examples in every run; no deadline, as a busy machine is not a defect.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accelerator", choices=["cpu", "cuda"], default="cpu", help="where tests that take the `accelerator` fixture run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--accelerator") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--accelerator cuda: torch finds no CUDA device here. Leave the option out to run on the CPU.")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names bytes by how many they are. Compressed ones hold the time, and all processes must collect tests of the same names."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


def pytest_collection_finish() -> None:
    """Leaves the half a million objects that imports have made out of every later garbage collection: none of them ever dies."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> str:
    """What a test gives to `Trainer(accelerator=...)`."""
    return request.config.getoption("--accelerator")


@pytest.fixture
def device(accelerator: str) -> torch.device:
    """The device behind `accelerator`."""
    return torch.device(accelerator)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps logs and checkpoints that a Trainer writes where it stands out of the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).parents[1]
