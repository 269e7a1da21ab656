"""MixtureDataModule: named domains of text, tokenised once, in rows for a causal LM."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_megatrain.datamodules.documents import DocumentSource, document_hash
from lightning_megatrain.datamodules.dynamic_loader import DynamicLoader
from lightning_megatrain.datamodules.packing import PackedBlocks, PaddedDocuments, keeps_documents_apart, pad_batch
from lightning_megatrain.datamodules.shares import name_seed
from lightning_megatrain.datamodules.text_beginnings import check_files
from lightning_megatrain.datamodules.text_domains import Domain, as_domains, val_domain
from lightning_megatrain.datamodules.text_streams import TextStream, check_streams, join, read_validation
from lightning_megatrain.datamodules.token_cache import SPLITS, TokenizedDocuments, cache_key, default_cache_dir, open_split, tokenize
from lightning_megatrain.datamodules.tokenizers import encode, load_tokenizer

_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


class MixtureDataModule(L.LightningDataModule):
    """Named domains of text in fixed proportions, with one validation loader per domain.

    Batches are `input_ids` and `labels` (B, T) int64 with `position_ids` where documents are packed, `attention_mask` where they
    are padded. `labels[t]` is the id at `t`, to be predicted from `t - 1`, or `-100`.

    Args:
        domains: Domains by name: :class:`Domain` objects or mappings of their arguments.
        tokenizer: A hub id, a local folder, or `"bytes"`.
        block_size: Tokens a row; at most the model's positions.
        batch_size: Rows a batch.
        packing: `"packed"` fills each row with documents that do not see each other, `"padded"` gives each its own row.
            `"auto"` packs unless the model would mix packed documents (state-space models, hybrids); it needs a model with a
            Hugging Face `config`.
        val_fraction: Share of each domain's documents kept for validation. A streamed domain has settings of its own for that.
        test_fraction: Share kept for `trainer.test`.
        cache_dir: Where tokens are kept, under a hash of contents, tokenizer and split. None: the user's cache folder.
        num_workers: Loader processes. Rows are read from a memory map, so 0 is usually enough; streamed domains are tokenised here.
        seed: Where the order of rows, and of documents in a `shuffle_buffer`, comes from.
        steps_per_epoch: Batches in an epoch. None: one pass over all rows; where proportions hold, the full batches that one takes, in
            which some rows may come twice and others not at all. Needed where a domain is streamed.

    Raises:
        ValueError: A setting is out of range, names clash, or a proportion is not positive.
        FileNotFoundError: A domain's path or glob matches nothing.
    """

    def __init__(
        self,
        domains: dict[str, Domain],
        tokenizer: str,
        block_size: int = 1024,
        batch_size: int = 8,
        packing: Literal["auto", "packed", "padded"] = "auto",
        val_fraction: float = 0.05,
        test_fraction: float = 0.0,
        cache_dir: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (("block_size", block_size, 2), ("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
            if value < least:
                raise ValueError(f"`{name}` is {value}: it must be at least {least}.")
        if packing not in ("auto", "packed", "padded"):
            raise ValueError(f"`packing` is {packing!r}: it must be 'auto', 'packed' or 'padded'.")
        if not (0 <= val_fraction < 1 and 0 <= test_fraction < 1 and val_fraction + test_fraction < 1):
            raise ValueError(
                f"`val_fraction` {val_fraction} and `test_fraction` {test_fraction} must be shares that leave some for training."
            )
        self.domains = as_domains(domains)
        check_streams(self.domains, (val_fraction, test_fraction), steps_per_epoch)
        self.tokenizer_name = tokenizer
        self.block_size = block_size
        self.batch_size = batch_size
        self.packing = packing
        self.fractions = (val_fraction, test_fraction)
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        self.num_workers = num_workers
        self.seed = seed
        self.steps_per_epoch = steps_per_epoch
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._folders: dict[str, Path] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        """Rows by split (train, val, test), then by domain; filled by :meth:`setup`. Of a streamed domain the first are a `TextStream`."""
        # Only what finds the tokenizer again: an exported model needs it, and the rest is in the run's config.yaml.
        # The frame is given: Lightning's own look for it leaves a cycle, so that all that callers hold lives until the garbage collector
        # comes, which needs five seconds for each worker of a loader.
        # A mapping, as the command line's arguments, which Lightning would look them up in, are those of a subclass.
        self.save_hyperparameters({"tokenizer": tokenizer, "block_size": block_size}, frame=inspect.currentframe())

    @property
    def domain_names(self) -> list[str]:
        """The names of the domains that have validation rows (all, if none has), in the order of the validation loaders."""
        return list(self.val_datasets or self.domains)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded at first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_name)
        return self._tokenizer

    @property
    def pad_id(self) -> int:
        """The id that fills rows up: the tokenizer's, else its end token's, else 0."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    @override
    def prepare_data(self) -> None:
        """Check everything that can be wrong, the beginning of each file included, then tokenise what the cache does not hold."""
        self._check_model()
        for name, domain in self.domains.items():
            for part in (domain, val_domain(domain)):
                if part is not None:
                    check_files(name, part)
        sources = {name: DocumentSource(name, domain) for name, domain in self.domains.items()}
        for name, source in sources.items():
            if source.is_empty():
                raise ValueError(
                    f"Domain {name!r} is empty: {_where(self.domains[name])} holds no text. Remove the domain or mend its source."
                )
        for name, source in sources.items():
            if not self.domains[name].streamed:
                tokenize(source, self.tokenizer, self.fractions, self._folder(name, source))

    @override
    def setup(self, stage: str) -> None:
        """Map the tokens, of which nothing is read yet. Of a streamed domain the validation documents are read and tokenised."""
        if self.rows:
            return
        self._check_model()
        packed = self._packs()
        rows: dict[str, dict[str, Any]] = {split: {} for split in SPLITS}
        for name, domain in self.domains.items():
            if domain.streamed:
                texts = read_validation(name, domain)
                held_out = frozenset(map(document_hash, texts))
                pad_id = self.pad_id if packed else None
                rows["train"][name] = TextStream(
                    DocumentSource(name, domain),
                    self.tokenizer,
                    self.block_size,
                    pad_id,
                    held_out,
                    domain.shuffle_buffer,
                    seed=[self.seed, name_seed(name)],
                )
                rows["val"][name] = self._rows(join(encode(self.tokenizer, texts) if texts else []), packed)
                continue
            for split in SPLITS:
                rows[split][name] = self._rows(open_split(self._folder(name), split), packed)
        self.rows = rows

    def _rows(self, documents: TokenizedDocuments, packed: bool) -> PackedBlocks | PaddedDocuments:
        return PackedBlocks(documents, self.block_size, self.pad_id) if packed else PaddedDocuments(documents, self.block_size)

    def proportions(self) -> list[float]:
        """Each domain's share of the training rows, summing to one."""
        streamed = any(domain.streamed for domain in self.domains.values())
        weights = [
            domain.proportion if domain.proportion is not None else 1.0 if streamed else float(len(self.rows["train"][name]))
            for name, domain in self.domains.items()
        ]
        return [weight / sum(weights) for weight in weights]

    @property
    def val_datasets(self) -> dict[str, PackedBlocks | PaddedDocuments]:
        """The validation rows by domain: a policy's target can be `"val_datasets"`, or `"val_datasets.code"` for one of them."""
        return {name: rows for name, rows in self.rows.get("val", {}).items() if len(rows)}

    @override
    def train_dataloader(self) -> DynamicLoader:
        """One loader over all domains, which policies can change.

        An epoch is `steps_per_epoch` batches, or as many as all rows together fill; each row once where no domain has a proportion.
        """
        given = any(domain.proportion is not None for domain in self.domains.values())
        return DynamicLoader(
            self.rows["train"],
            self.batch_size,
            proportions=dict(zip(self.domains, self.proportions(), strict=True)) if given else None,
            seed=self.seed,
            steps_per_epoch=self.steps_per_epoch,
            num_workers=self.num_workers,
            collate_fn=partial(pad_batch, pad_id=self.pad_id),
        )

    @override
    def val_dataloader(self) -> list[DataLoader[Any]]:
        """One loader per domain, in the order of `domain_names`."""
        return [self._loader(rows) for rows in self.val_datasets.values()]

    @override
    def test_dataloader(self) -> list[DataLoader[Any]]:
        """One loader per domain over the test documents."""
        if not self.fractions[1]:
            raise MisconfigurationException("There are no test documents: set `test_fraction` in MixtureDataModule, for example to 0.05.")
        return [self._loader(rows) for rows in self.rows["test"].values()]

    @override
    def predict_dataloader(self) -> list[DataLoader[Any]]:
        """The validation loaders: prediction scores their rows."""
        return self.val_dataloader()

    def _loader(self, rows: Any) -> DataLoader[Any]:
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=partial(pad_batch, pad_id=self.pad_id),
        )

    def _folder(self, name: str, source: DocumentSource | None = None) -> Path:
        # Hashing the contents is the costly part of finding the folder: once per process.
        if name not in self._folders:
            self._folders[name] = self.cache_dir / cache_key(
                source or DocumentSource(name, self.domains[name]), self.tokenizer, self.fractions
            )
        return self._folders[name]

    def _model_config(self) -> PretrainedConfig | None:
        module = self.trainer.lightning_module if self.trainer is not None else None
        for holder in (module, getattr(module, "model", None)):
            config = getattr(holder, "config", None)
            if isinstance(config, PretrainedConfig):
                return config.get_text_config()
        return None

    def _packs(self) -> bool:
        if self.packing != "auto":
            return self.packing == "packed"
        config = self._model_config()
        if config is None:
            raise MisconfigurationException(
                "packing='auto' needs a LightningModule with a Hugging Face `config` (itself or in `.model`), to know whether the model "
                "keeps packed documents apart. Set packing='packed' or packing='padded' in MixtureDataModule."
            )
        return keeps_documents_apart(config)

    def _check_model(self) -> None:
        """Compare tokenizer and block size with the model's config, where there is one."""
        config = self._model_config()
        if config is None:
            return
        limit = next((getattr(config, name) for name in _POSITION_LIMITS if getattr(config, name, None)), None)
        if limit is not None and self.block_size > limit:
            raise ValueError(f"`block_size` is {self.block_size}, but the model has {limit} positions: set block_size={limit} or less.")
        if len(self.tokenizer) > config.vocab_size:
            raise ValueError(
                f"The tokenizer {self.tokenizer_name!r} has {len(self.tokenizer)} tokens, but the model's vocabulary "
                f"holds {config.vocab_size}: use the model's own tokenizer, or a model with a `vocab_size` at least as large."
            )


def _where(domain: Domain) -> str:
    return str(domain.files if domain.files is not None else domain.dataset)
