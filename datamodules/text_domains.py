"""What a domain of text is: a name, where its documents come from, and its share of the mixture."""

from __future__ import annotations

import dataclasses
import glob
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatrain.datamodules.text_files import refuse_packed


@dataclasses.dataclass(kw_only=True)
class Domain:
    """One named source of documents. Give `files` or `dataset`, not both.

    Args:
        files: A path or glob (`**` goes into folders), or a list of them. `.jsonl` and `.json` give one document a record,
            `.parquet` and `.csv` one a row; any other file (`.txt`, `.md`, `.py`, no ending at all) is one document. Text is UTF-8, with or
            without a byte order mark. Files of each kind may be compressed (`.gz`, `.bz2`, `.xz`); archives and what is not text are
            refused.
        dataset: What :func:`datasets.load_dataset` takes (a hub id, or a folder of data files), or a folder written by
            `save_to_disk`.
        subset: The configuration of the hub data set, where it has several.
        split: The split of the data set.
        field: The field, column or feature that holds the text.
        proportion: This domain's weight in the mixture, relative to the others'. None in every domain: each weighs as
            many blocks as it has, or the same as the others where one is streamed.
        streamed: Read, tokenise and pack the documents while the model trains, in their own order (or out of a `shuffle_buffer`) and over
            again when they end. Nothing is kept on disk; a hub data set is not downloaded (`streaming=True`). A resumed run reads up to
            its place again. Needs `steps_per_epoch` of the data module, and takes its validation documents from `val_documents`,
            `val_files` or `val_split`, not from `val_fraction`. They are held in memory, and the same texts are left out of training.
        shuffle_buffer: Of a streamed domain: documents that each process which reads it holds in memory (as text) and draws from at
            random, in another order in each pass. That many are read before the first batch. 0: the documents' own order.
        val_documents: Of a streamed domain: how many documents are for validation, the first ones of `val_files` or `val_split`
            (default: all), else the first ones of the stream itself. 0: none.
        val_files: Of a streamed domain: the files of its validation documents, as in `files`.
        val_split: Of a streamed domain: the split of its data set that holds them.
    """

    files: str | list[str] | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    field: str = "text"
    proportion: float | None = None
    streamed: bool = False
    shuffle_buffer: int = 0
    val_documents: int | None = None
    val_files: str | list[str] | None = None
    val_split: str | None = None


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
    _check_streamed(name, domain)
    for source in (domain, val_domain(domain)):
        if source is not None and source.files is not None:
            find_files(name, source)
    return domain


def val_domain(domain: Domain) -> Domain | None:
    """Where a streamed domain's validation documents are, if they are apart from its own."""
    if domain.val_files is not None:
        return dataclasses.replace(domain, files=domain.val_files, dataset=None)
    return None if domain.val_split is None else dataclasses.replace(domain, split=domain.val_split)


def _check_streamed(name: str, domain: Domain) -> None:
    if domain.shuffle_buffer < 0:
        raise ValueError(f"Domain {name!r} has shuffle_buffer={domain.shuffle_buffer}: it must be a number of documents, or 0 for none.")
    if domain.shuffle_buffer and not domain.streamed:
        raise ValueError(f"Domain {name!r} has `shuffle_buffer`, which is for a streamed domain: rows of others are shuffled as a whole.")
    for key in ("val_documents", "val_files", "val_split"):
        if getattr(domain, key) is not None and not domain.streamed:
            raise ValueError(
                f"Domain {name!r} has `{key}`, which is for a streamed domain: set streamed=True, or leave it out and let "
                "`val_fraction` of the data module hold documents back."
            )
    if domain.val_documents is not None and domain.val_documents < 0:
        raise ValueError(f"Domain {name!r} has val_documents={domain.val_documents}: it must be a number of documents, or 0 for none.")
    if domain.val_split is not None and (domain.dataset is None or domain.val_files is not None):
        raise ValueError(f"Domain {name!r}: `val_split` names a split of `dataset`; give that without `val_files`, or only `val_files`.")


def find_files(name: str, domain: Domain) -> list[Path]:
    """Return the files of a domain, sorted, each once.

    Raises:
        FileNotFoundError: A path or glob matches no file, or a link to one that is not there.
        ValueError: A file is an archive, or compressed in a way that is not read.
    """
    patterns = [domain.files] if isinstance(domain.files, str) else domain.files or []
    found: set[Path] = set()
    for pattern in patterns:
        expanded = str(Path(pattern).expanduser())
        # A file whose own name holds brackets is still found by its name.
        matches = [Path(expanded)] if Path(expanded).is_file() else [Path(p) for p in glob.glob(expanded, recursive=True)]
        lost = next((path for path in matches if path.is_symlink() and not path.exists()), None)
        if lost is not None:
            raise FileNotFoundError(
                f"Domain {name!r}: {lost} is a link to {lost.readlink()}, which is not there. Mend it, or leave it out."
            )
        files = [path for path in matches if path.is_file()]
        if not files:
            raise FileNotFoundError(f"Domain {name!r}: no file matches {pattern!r} (from {Path.cwd()}).")
        found.update(files)
    if not found:
        raise FileNotFoundError(f"Domain {name!r}: `files` is an empty list.")
    for path in sorted(found):
        refuse_packed(name, path)
    return sorted(found)
