"""Hugging Face data sets as sources of text: opened, and named in what is raised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_megatrain.datamodules.text_domains import Domain
from lightning_megatrain.datamodules.text_files import kind_of


@contextlib.contextmanager
def naming_dataset(name: str, domain: Domain) -> Iterator[None]:
    """Name the domain and the data set in what is raised when its files cannot be read."""
    import datasets
    import pyarrow as pa

    try:
        yield
    except (OSError, UnicodeDecodeError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        cause = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise OSError(f"Domain {name!r}: data set {domain.dataset} cannot be read ({cause}).") from error


def open_dataset(name: str, domain: Domain) -> Any:
    """Load a domain's data set with nothing but its column of text: a `Dataset`, or an `IterableDataset` if it is streamed.

    Raises:
        ValueError: It has no such split or column.
        OSError: Its files cannot be read.
    """
    import datasets

    assert domain.dataset is not None
    folder = Path(domain.dataset).expanduser()
    if _is_saved(folder):
        loaded = datasets.load_from_disk(str(folder))
        if isinstance(loaded, datasets.DatasetDict):
            if domain.split not in loaded:
                raise ValueError(f"Domain {name!r}: {folder} has no split {domain.split!r}. It has: {', '.join(loaded)}.")
            loaded = loaded[domain.split]
        if domain.streamed:
            loaded = loaded.to_iterable_dataset(num_shards=min(len(loaded), len(loaded.cache_files)) or 1)
    else:
        with naming_dataset(name, domain):
            loaded = datasets.load_dataset(domain.dataset, domain.subset, split=domain.split, streaming=domain.streamed)
    if loaded.column_names is None:
        return loaded  # a stream that does not know its columns before it is read
    if domain.field not in loaded.column_names:
        raise ValueError(
            f"Domain {name!r}: {domain.dataset} has no column {domain.field!r}. It has: {', '.join(loaded.column_names)}. Set `field`."
        )
    return loaded.select_columns([domain.field])


def _is_saved(folder: Path) -> bool:
    """Whether it was written by `save_to_disk`."""
    return folder.is_dir() and any((folder / file).is_file() for file in ("dataset_info.json", "dataset_dict.json"))


def parquet_files(name: str, domain: Domain) -> list[Path]:
    """Return the parquet files of a data set that is a local folder of data files. What its other files may hold only `datasets` knows."""
    import datasets

    assert domain.dataset is not None
    folder = Path(domain.dataset).expanduser()
    if not folder.is_dir() or _is_saved(folder):
        return []
    with naming_dataset(name, domain):
        files = datasets.load_dataset_builder(domain.dataset, domain.subset).config.data_files or {}
    return [Path(file) for file in files.get(domain.split, []) if "://" not in file and kind_of(Path(file)) == ".parquet"]
