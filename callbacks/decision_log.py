"""What was decided: rows of (step, index, domain, score, weight) in a folder of parquet files that can be read at any time."""

from __future__ import annotations

import shutil
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
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = table["step"]
        name = f"decisions-{steps[0].as_py():010d}-{steps[-1].as_py():010d}.parquet"
        if (self.folder / name).exists():  # a further file of the same step
            name = name.replace(".parquet", f"-{len(list(self.folder.glob('*.parquet'))):06d}.parquet")
        part = self.folder / f".{name}.part"
        pq.write_table(table, part)
        part.rename(self.folder / name)

    def start(self) -> None:
        """Begin anew: what an earlier run has left in the folder is moved to a folder beside it, with a number."""
        if not any(self.folder.glob("decisions-*.parquet")):
            return
        number = 1
        while (kept := self.folder.with_name(f"{self.folder.name}.{number}")).exists():
            number += 1
        self.folder.rename(kept)
        rank_zero_info(f"The decisions of an earlier run in {self.folder} are kept in {kept}.")

    def resume(self, earlier: Path, step: int) -> None:
        """Take over the decisions of an interrupted run up to ``step``; those after it are made again.

        Args:
            earlier: That run's folder; may be this one, or gone.
            step: Optimizer steps done at the checkpoint.
        """
        try:
            rows = read_decisions(earlier) if any(earlier.glob("decisions-*.parquet")) else SCHEMA.empty_table()
        except pa.ArrowException as error:
            rank_zero_warn(f"The earlier decisions in {earlier} cannot be read, so the records begin with this resume. ({error})")
            self.start()
            return
        if self.folder.exists() and self.folder.resolve() == earlier.resolve():
            shutil.rmtree(self.folder)
        self.start()
        kept = rows.filter(pa.compute.less_equal(rows["step"], step))
        if len(kept):
            self._pending = [kept]
            self.flush()


def read_decisions(folder: str | Path) -> pa.Table:
    """Read all decisions of a folder, in the order they were made.

    Raises:
        FileNotFoundError: there are none.
    """
    files = sorted(Path(folder).glob("decisions-*.parquet"))
    if not files:
        raise FileNotFoundError(f"There are no decisions in {folder}: it holds no decisions-*.parquet file.")
    return pa.concat_tables([pq.read_table(f, schema=SCHEMA) for f in files])
