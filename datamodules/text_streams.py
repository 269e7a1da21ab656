"""A domain of text as a stream of rows: read, tokenised and packed while the model trains, with nothing kept on disk."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from lightning_megatrain.datamodules.documents import DocumentSource, batched, document_hash
from lightning_megatrain.datamodules.packing import PackedBlocks, PaddedDocuments, Row
from lightning_megatrain.datamodules.streams import shuffled
from lightning_megatrain.datamodules.text_domains import Domain, val_domain
from lightning_megatrain.datamodules.token_cache import TokenizedDocuments
from lightning_megatrain.datamodules.tokenizers import encode


class TextStream(IterableDataset[Row]):
    """The rows of one domain in the order of its documents, the same as :class:`PackedBlocks` or :class:`PaddedDocuments` gives.

    It has a shard for each file (or shard of the data set), so that the loader can give each worker its own. A shard packs its own
    documents: only its last row has padding. Holds some hundred documents at a time.

    Args:
        source: The documents.
        tokenizer: Gives the ids, as for the token cache.
        block_size: T, tokens a row.
        pad_id: The id that fills a packed row up. None: one document a row, not packed.
        held_out: Hashes of the documents that are not to be trained on.
        shuffle_buffer: Documents to draw from at random, anew in each pass; 0 keeps their order.
        seed: Of the draws.

    Raises:
        ValueError: (when read) There is no document to train on.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        pad_id: int | None,
        held_out: frozenset[int] = frozenset(),
        shuffle_buffer: int = 0,
        seed: Sequence[int] = (),
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.pad_id = pad_id
        self.held_out = held_out
        self.shuffle_buffer = shuffle_buffer
        self._seed = list(seed)
        self._pass = 0
        self._is_whole = True

    @property
    def num_shards(self) -> int:
        """Files, or shards of the data set: the loader reads the stream in parts if they are a multiple of ranks x workers."""
        return self.source.num_shards

    def shard(self, num_shards: int, index: int) -> TextStream:
        """One of `num_shards` parts."""
        part = copy.copy(self)
        part.source, part._seed, part._is_whole = self.source.shard(num_shards, index), [*self._seed, index], num_shards == 1
        return part

    def set_epoch(self, epoch: int) -> None:
        """Say which pass over the documents comes next: each has its own order where they are shuffled."""
        self._pass = epoch

    def __iter__(self) -> Iterator[Row]:
        documents: Iterable[str] = (text for text in self.source if not self.held_out or document_hash(text) not in self.held_out)
        if self.shuffle_buffer:
            documents = shuffled(documents, self.shuffle_buffer, [*self._seed, self._pass])
        encoded = (encode(self.tokenizer, texts) for texts in batched(documents))
        empty = True
        for row in self._padded(encoded) if self.pad_id is None else self._packed(encoded, self.pad_id):
            empty = False
            yield row
        if empty:
            raise ValueError(self._why_empty())

    def _why_empty(self) -> str:
        domain, held = self.source.domain, "" if not self.held_out else " but validation documents"
        cures = [] if self._is_whole else ["use fewer workers (`num_workers`), so that a part holds more"]
        if held and domain.val_files is not None:
            cures.insert(0, f"name files in `val_files` ({domain.val_files}) that hold other documents than `files`")
        elif held and domain.val_split is not None:
            cures.insert(0, f"name a split in `val_split` ({domain.val_split}) that holds other documents than `split`")
        elif held:
            cures.insert(0, f"lower `val_documents` ({domain.val_documents})")
        part = "its stream" if self._is_whole else f"a part of its stream ({self.num_shards} file(s) or shard(s))"
        cure = ", or ".join(cures or ["remove the domain or mend its source"])
        return f"Domain {self.source.name!r}: {part} holds no text{held}. {cure[0].upper()}{cure[1:]}."

    def _packed(self, encoded: Iterable[list[npt.NDArray[np.int64]]], pad_id: int) -> Iterator[Row]:
        begun: list[npt.NDArray[np.int64]] = []  # documents of the row that is not full yet; a row's first token always begins one
        for ids in encoded:
            documents = join([*begun, *ids])
            rows, full = PackedBlocks(documents, self.block_size, pad_id), int(documents.starts[-1]) // self.block_size
            for index in range(full):
                yield rows[index]
            end = full * self.block_size
            begun = np.split(documents.tokens[end:], documents.starts[documents.starts > end] - end)
        if sum(map(len, begun)):
            yield PackedBlocks(join(begun), self.block_size, pad_id)[0]

    def _padded(self, encoded: Iterable[list[npt.NDArray[np.int64]]]) -> Iterator[Row]:
        for ids in encoded:
            rows = PaddedDocuments(join(ids), self.block_size)
            for index in range(len(rows)):
                yield rows[index]


def join(documents: list[npt.NDArray[np.int64]]) -> TokenizedDocuments:
    """Put tokenised documents end to end in memory."""
    starts = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return TokenizedDocuments(np.concatenate([np.empty(0, np.int64), *documents]), starts)


def read_validation(name: str, domain: Domain) -> list[str]:
    """The validation documents of a streamed domain: of its `val_files` or `val_split`, else of its own front.

    Raises:
        ValueError: There should be some, and there is none.
    """
    apart = val_domain(domain)
    if domain.val_documents == 0 or (apart is None and domain.val_documents is None):
        return []
    texts = list(islice(DocumentSource(name, apart or domain), domain.val_documents))
    if not texts:
        raise ValueError(f"Domain {name!r}: its validation source ({domain.val_files or domain.val_split}) holds no text.")
    return texts


def check_streams(domains: dict[str, Domain], fractions: tuple[float, float], steps_per_epoch: int | None) -> None:
    """Refuse what needs to know how long a stream is."""
    for name, domain in domains.items():
        if not domain.streamed:
            continue
        if steps_per_epoch is None:
            raise ValueError(
                f"Domain {name!r} is streamed, so its length is not known: set `steps_per_epoch` in MixtureDataModule, the batches to call "
                "an epoch (for a run of `max_steps` in one epoch: max_steps x accumulate_grad_batches)."
            )
        if fractions[0] and domain.val_documents is None and domain.val_files is None and domain.val_split is None:
            raise ValueError(
                f"Domain {name!r} is streamed, so a share of its documents (`val_fraction` {fractions[0]}) cannot be held out: give the "
                "domain `val_files`, `val_split`, or `val_documents`, the number of its first documents to hold out (0 for none)."
            )
        if fractions[1]:
            raise ValueError(
                f"Domain {name!r} is streamed, so a share of its documents (`test_fraction` {fractions[1]}) cannot be held out: set "
                "`test_fraction` to 0, and validate with a config whose `val_files` or `val_split` are the test documents."
            )
