"""What a domain of text is: a name, where its documents come from, and its share of the mixture."""

from __future__ import annotations

import dataclasses
import glob
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(kw_only=True)
class Domain:
    """One named source of documents. Give `files` or `dataset`, not both.

    Args:
        files: A path or glob (`**` goes into folders), or a list of them. `.jsonl` and `.json` give one document a record,
            `.parquet` and `.csv` one a row; any other file (text, Markdown, Python source) is one document.
        dataset: What :func:`datasets.load_dataset` takes (a hub id, or a folder of data files), or a folder written by
            `save_to_disk`.
        subset: The configuration of the hub data set, where it has several.
        split: The split of the data set.
        field: The field, column or feature that holds the text.
        proportion: This domain's weight in the mixture, relative to the others'. None in every domain: each weighs as
            many blocks as it has.
    """

    files: str | list[str] | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    field: str = "text"
    proportion: float | None = None


def as_domains(domains: Mapping[str, Domain | Mapping[str, Any]]) -> dict[str, Domain]:
    """Check named domains, given as :class:`Domain` objects or as plain mappings.

    Raises:
        TypeError: Something is not a mapping of names to domains.
        ValueError: A name, key, source or proportion is wrong; the message names the domain.
        FileNotFoundError: A path or glob matches no file.
    """
    if not isinstance(domains, Mapping):
        raise TypeError(f"`domains` must map names to domains, got {type(domains).__name__}.")
    if not domains:
        raise ValueError("`domains` is empty: name at least one, for example domains={'code': {'files': 'src/**/*.py'}}.")
    checked = {name: _as_domain(name, domain) for name, domain in domains.items()}
    seen: dict[str, str] = {}
    for name in checked:
        twin = seen.setdefault(name.strip().casefold(), name)
        if twin != name:
            raise ValueError(f"The domains {twin!r} and {name!r} have the same name but for case or spaces: rename one.")
    given = [name for name, domain in checked.items() if domain.proportion is not None]
    if given and len(given) < len(checked):
        missing = [name for name in checked if name not in given]
        raise ValueError(f"`proportion` is set for {given} but not for {missing}: set it for every domain or for none.")
    return checked


def _as_domain(name: str, domain: Domain | Mapping[str, Any]) -> Domain:
    if not isinstance(name, str) or not name.strip() or "/" in name:
        raise ValueError(f"{name!r} is no name for a domain: it must be a non-empty string without '/'.")
    if not isinstance(domain, Domain):
        if not isinstance(domain, Mapping):
            raise TypeError(f"Domain {name!r} must be a mapping such as {{'files': '*.txt'}}, got {type(domain).__name__}.")
        known = [field.name for field in dataclasses.fields(Domain)]
        unknown = sorted(set(domain) - set(known))
        if unknown:
            raise ValueError(f"Domain {name!r} has the unknown key {unknown[0]!r}. Known keys: {', '.join(known)}.")
        domain = Domain(**domain)
    if (domain.files is None) == (domain.dataset is None):
        raise ValueError(f"Domain {name!r} needs `files` or `dataset`, and only one of them.")
    share = domain.proportion
    if share is not None and not (math.isfinite(share) and share > 0):
        raise ValueError(f"Domain {name!r} has proportion {share}: it must be a positive number. Leave the domain out to exclude it.")
    if domain.files is not None:
        find_files(name, domain)
    return domain


def find_files(name: str, domain: Domain) -> list[Path]:
    """Return the files of a domain, sorted, each once.

    Raises:
        FileNotFoundError: A path or glob matches no file.
    """
    patterns = [domain.files] if isinstance(domain.files, str) else domain.files or []
    found: set[Path] = set()
    for pattern in patterns:
        expanded = str(Path(pattern).expanduser())
        # A file whose own name holds brackets is still found by its name.
        matches = [Path(expanded)] if Path(expanded).is_file() else [Path(p) for p in glob.glob(expanded, recursive=True)]
        files = [path for path in matches if path.is_file()]
        if not files:
            raise FileNotFoundError(f"Domain {name!r}: no file matches {pattern!r} (from {Path.cwd()}).")
        found.update(files)
    if not found:
        raise FileNotFoundError(f"Domain {name!r}: `files` is an empty list.")
    return sorted(found)
