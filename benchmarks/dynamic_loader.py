"""What DynamicLoader costs beside torch's DataLoader: seconds per epoch, interleaved in one process, ratio of medians.

python benchmarks/dynamic_loader.py --rounds 15
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_megatrain.datamodules import DynamicLoader

TOKENS = 512


class Rows(Dataset):
    """Rows of a language model: two tensors of 512 tokens, built as the project's own rows are."""

    def __init__(self, n: int) -> None:
        self.n, self.tokens = n, torch.arange(n * TOKENS)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = self.tokens[i * TOKENS : (i + 1) * TOKENS].clone()
        return {"input_ids": ids, "labels": ids.clone()}


def loaders(rows: int, batch_size: int, workers: int) -> dict[str, object]:
    options = {"num_workers": workers}
    plain = DataLoader(Rows(rows), batch_size, shuffle=True, persistent_workers=workers > 0, **options)
    wrapped = DataLoader(Rows(rows), batch_size, shuffle=True, persistent_workers=workers > 0, **options)
    named = {name: Rows(rows // 4) for name in "abcd"}
    return {
        "DataLoader": plain,
        "DynamicLoader": DynamicLoader(Rows(rows), batch_size, **options),
        "DataLoader, wrapped by a policy": DynamicLoader.from_dataloader(wrapped),
        "DynamicLoader, four domains mixed": DynamicLoader(
            named, batch_size, proportions={"a": 4, "b": 3, "c": 2, "d": 1}, steps_per_epoch=rows // batch_size, **options
        ),
    }


def seconds_of_an_epoch(loader: object) -> float:
    start = time.perf_counter()
    count = sum(1 for _ in loader)  # type: ignore[attr-defined]
    assert count == len(loader)  # type: ignore[arg-type]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{arguments.rows} rows of {TOKENS} tokens in batches of {arguments.batch}, {arguments.rounds} rounds, torch {torch.__version__}\n"
    )
    print("| workers | loader | microseconds a batch | over DataLoader | more, microseconds |\n|---|---|---|---|---|")
    for workers in (0, 1):
        subjects = loaders(arguments.rows, arguments.batch, workers)
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for number in range(arguments.rounds + 1):
            for name, loader in subjects.items():
                seconds = seconds_of_an_epoch(loader)
                if number:  # the first starts the workers
                    times[name].append(seconds)
        medians = {name: statistics.median(values) * 1e6 * arguments.batch / arguments.rows for name, values in times.items()}
        base = medians["DataLoader"]
        for name, value in medians.items():
            print(f"| {workers} | {name} | {value:.0f} | {value / base:.2f} | {value - base:.0f} |")


if __name__ == "__main__":
    main()
