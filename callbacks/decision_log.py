"""What was decided: rows of (step, index, domain, score, weight) in a folder of parquet files that can be read at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

SCHEMA = pa.schema(
    [("step", pa.int64()), ("index", pa.int64()), ("domain", pa.string()), ("score", pa.float64()), ("weight", pa.float64())]
)


class DecisionLog:
    """Appends decisions as parquet files, one for many rows, each written whole or not at all.

    ``pandas.read_parquet(folder)`` or :func:`read_decisions` reads them together.

    Args:
        folder: Made when the first rows are written.
        flush_rows: Rows kept in memory before a file is written.
    """

    def __init__(self, folder: Path, flush_rows: int = 10_000) -> None:
        self.folder = folder
        self._flush_rows = flush_rows
        self._pending: list[pa.Table] = []

    def append(self, step: int, **columns: Any) -> None:
        """Add rows of one step. Columns that are not given are null.

        Args:
            step: Optimizer steps done.
            columns: ``index``, ``domain``, ``score``, ``weight``, each of the same length.
        """
        n = max(len(c) for c in columns.values() if c is not None)
        arrays = [pa.array(np.full(n, step), type=pa.int64())]
        for field in list(SCHEMA)[1:]:
            given = columns.get(field.name)
            arrays.append(pa.nulls(n, field.type) if given is None else pa.array(given, type=field.type))
        self._pending.append(pa.Table.from_arrays(arrays, schema=SCHEMA))
        if sum(len(t) for t in self._pending) >= self._flush_rows:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory."""
        if not self._pending:
            return
        table = pa.concat_tables(self._pending)
        self._pending = []
        self._add(table)

    def start(self) -> None:
        """Begin anew: what an earlier run has left in the folder is moved to a folder beside it, with a number."""
        if not _files(self.folder):
            return
        number = 1
        while (kept := self.folder.with_name(f"{self.folder.name}.{number}")).exists():
            number += 1
        self.folder.rename(kept)
        rank_zero_info(f"The decisions of an earlier run in {self.folder} are kept in {kept}.")

    def resume(self, earlier: Path, step: int) -> None:
        """Take over the decisions of an interrupted run up to ``step``; those after it are made again.

        A file at a time is replaced or removed, so that a resume that is itself interrupted leaves what another can go on from.

        Args:
            earlier: That run's folder; may be this one, or gone.
            step: Optimizer steps done at the checkpoint.
        """
        files = _files(earlier)
        try:
            ends = [pa.compute.max(pq.read_table(file, columns=["step"])["step"]).as_py() for file in files]
        except (pa.ArrowException, OSError) as error:
            rank_zero_warn(f"The earlier decisions in {earlier} cannot be read, so the records begin with this resume. ({error})")
            self.start()
            return
        in_place = self.folder.exists() and self.folder.resolve() == earlier.resolve()
        if not in_place:
            self.start()
        for file, end in zip(files, ends, strict=True):
            if in_place and end <= step:
                continue
            kept = _rows(file)
            kept = kept.filter(pa.compute.less_equal(kept["step"], step))
            if len(kept):
                self._add(kept, file.name)
            elif in_place:
                file.unlink()

    def _add(self, table: pa.Table, name: str | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if name is None:
            last = max((int(file.stem.rpartition("-")[2]) for file in _files(self.folder)), default=0)
            name = f"decisions-{last + 1:08d}.parquet"
        part = self.folder / f".{name}.part"
        pq.write_table(table, part)
        part.rename(self.folder / name)


def read_decisions(folder: str | Path) -> pa.Table:
    """Read all decisions of a folder, in the order they were made.

    Raises:
        FileNotFoundError: there are none.
    """
    files = _files(Path(folder))
    if not files:
        raise FileNotFoundError(f"There are no decisions in {folder}: it holds no decisions-*.parquet file.")
    return pa.concat_tables([_rows(file) for file in files])


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("decisions-*.parquet"))


def _rows(file: Path) -> pa.Table:
    return pq.read_table(file, schema=SCHEMA)
