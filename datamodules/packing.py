"""Rows for a causal LM: documents packed into full blocks, or one padded document a row.

Shapes: B rows, T tokens a row.

A packed row gives the model what each of its documents would get alone: `position_ids` restart with each document, from which
transformers builds a mask that keeps documents apart (`attention_mask` must stay None and `use_cache` False, or it does not), and
the first token of each document is no label. A document that does not fit the rest of a row goes on in the next row as
a document of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from lightning_megatrain.datamodules.token_cache import TokenizedDocuments

IGNORED = -100  # the label that counts in no loss, as in torch.nn.functional.cross_entropy
Row = dict[str, torch.Tensor]

# Attention kinds whose masks transformers builds from `position_ids`.
_ISOLATING_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# These build their masks without looking at `position_ids` (seen in transformers 5.24: a document's logits change with its neighbours).
_IGNORE_POSITIONS = {"bloom", "gpt_oss", "mpt", "opt"}


def keeps_documents_apart(config: PretrainedConfig) -> bool:
    """Whether a packed row of this model equals its documents run alone.

    False for models that carry a state along the row (Mamba, RWKV, convolutions, linear attention and their hybrids with
    attention), and for those known to ignore `position_ids` in their mask.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    classes = model_class if isinstance(model_class, (list, tuple)) else [model_class]
    if any(getattr(cls, "_is_stateful", False) for cls in classes):
        return False
    layer_types = set(getattr(config, "layer_types", None) or ())
    return layer_types <= _ISOLATING_LAYERS and config.model_type not in _IGNORE_POSITIONS


class PackedBlocks(Dataset[Row]):
    """Documents end to end, cut into rows of `block_size` tokens. Only the last row has padding.

    A row is `input_ids`, `labels` and `position_ids`, each (T,) int64. Labels are the ids themselves, `-100` on the first token of
    each document and on padding; padding has position 0.

    Args:
        documents: The tokens.
        block_size: T, tokens a row.
        pad_id: The id that fills the last row.
    """

    def __init__(self, documents: TokenizedDocuments, block_size: int, pad_id: int = 0) -> None:
        self.documents = documents
        self.block_size = block_size
        self.pad_id = pad_id

    def __len__(self) -> int:
        """The number of rows."""
        return -(-int(self.documents.starts[-1]) // self.block_size)

    def __getitem__(self, index: int) -> Row:
        """Build row `index`: one read of T tokens and one binary search."""
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)}.")
        begin = index * self.block_size
        ids = self.documents.tokens[begin : begin + self.block_size].astype(np.int64)
        where = np.arange(begin, begin + len(ids))
        starts = self.documents.starts
        own = starts[np.searchsorted(starts, where, side="right") - 1]
        position = where - np.maximum(own, begin)
        labels = np.where(position == 0, IGNORED, ids)
        padding = (0, self.block_size - len(ids))
        return {
            "input_ids": torch.from_numpy(np.pad(ids, padding, constant_values=self.pad_id)),
            "labels": torch.from_numpy(np.pad(labels, padding, constant_values=IGNORED)),
            "position_ids": torch.from_numpy(np.pad(position, padding)),
        }


class PaddedDocuments(Dataset[Row]):
    """One document a row, longer ones cut into rows of `block_size` tokens. Rows keep their own length until :func:`pad_batch`.

    A row is `input_ids`, `labels` and `attention_mask`, each (length,) int64.

    Args:
        documents: The tokens.
        block_size: The longest row.
    """

    def __init__(self, documents: TokenizedDocuments, block_size: int) -> None:
        self.documents = documents
        self.block_size = block_size
        rows = -(-np.diff(documents.starts) // block_size)  # of each document
        self._ends = np.cumsum(rows)

    def __len__(self) -> int:
        """The number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Row:
        """Read row `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)}.")
        document = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[document - 1]) if document else 0
        begin = int(self.documents.starts[document]) + (index - first) * self.block_size
        end = min(begin + self.block_size, int(self.documents.starts[document + 1]))
        ids = torch.from_numpy(self.documents.tokens[begin:end].astype(np.int64))
        labels = ids.clone()
        labels[0] = IGNORED
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def pad_batch(rows: list[Row], pad_id: int = 0) -> dict[str, Any]:
    """Stack rows to (B, T), padded on the right to the longest of them."""
    fill = {"input_ids": pad_id, "labels": IGNORED, "attention_mask": 0, "position_ids": 0}
    return {key: torch.nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True, padding_value=fill[key]) for key in rows[0]}
