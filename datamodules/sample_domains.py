"""Which domain each sample belongs to: named datasets, a column, or a function of the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

DomainOf = str | Callable[[Any], str | int]

THREE_FORMS = (
    "Say which domain a sample belongs to in one of three ways:\n"
    '  DynamicLoader(dataset, domain="source", ...)                  a column of the dataset\n'
    "  DynamicLoader(dataset, domain=lambda sample: sample[2], ...)  a function of the sample\n"
    '  DynamicLoader({"wiki": wiki, "code": code}, ...)              one dataset per name\n'
    'With a plain DataLoader give `domain=` to the policy, for instance ODM(domain="source").'
)


def find_domains(dataset: Any, domain: DomainOf) -> tuple[list[str], NDArray[np.int32]]:
    """Find the domain of every sample of a map-style dataset.

    A column of a Hugging Face dataset is read at once; otherwise every sample is fetched once, which costs one pass over the data.

    Args:
        dataset: A map-style dataset of N samples.
        domain: A column name, or a function of the sample that returns the name: a string, or a whole number.

    Returns:
        The sorted names, and (N,) int32 positions in them.

    Raises:
        KeyError: there is no such column.
        ValueError: samples have no columns, the function fails, or what gives the name is neither a string nor a whole number. It is no
            TypeError, as Lightning asks a loader for its iterator to see whether it is one, and reports a TypeError as an invalid loader.
    """
    if isinstance(domain, str):
        columns = getattr(dataset, "column_names", None)
        if isinstance(columns, list):
            if domain not in columns:
                raise KeyError(f"There is no column {domain!r} to take the domain from; the columns are {columns}.")
            return _positions(list(dataset.with_format(None)[domain]))
        return _positions([_column(dataset[i], domain) for i in _progress(len(dataset))])
    return _positions([_call(domain, dataset[i], i) for i in _progress(len(dataset))])


def _progress(n: int) -> Iterable[int]:
    return tqdm(range(n), desc="Finding domains", leave=False, disable=n < 10_000)


def _column(sample: Any, name: str) -> Any:
    if not isinstance(sample, Mapping):
        raise ValueError(
            f"`domain={name!r}` names a column, but a sample is a {type(sample).__name__}. "
            "Give a function instead: `domain=lambda sample: ...`."
        )
    if name not in sample:
        raise KeyError(f"There is no column {name!r} to take the domain from; a sample has {list(sample)}.")
    return sample[name]


def _call(domain: Callable[[Any], Any], sample: Any, index: int) -> Any:
    try:
        return domain(sample)
    except Exception as error:
        raise ValueError(f"`domain` failed on sample {index}, a {type(sample).__name__}: {type(error).__name__}: {error}") from error


def _positions(labels: list[Any]) -> tuple[list[str], NDArray[np.int32]]:
    for index, label in enumerate(labels):
        if not isinstance(label, str | int | np.integer | np.bool_):
            raise ValueError(
                f"`domain` must give a string or a whole number, the name of a domain, but for sample {index} it gives a "
                f"{type(label).__name__}."
            )
    names, ids = np.unique(np.array([str(label) for label in labels]), return_inverse=True)
    return names.tolist(), ids.reshape(-1).astype(np.int32)
