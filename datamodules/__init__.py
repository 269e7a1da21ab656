"""Data for training: named domains of text, packed for a causal LM, and loaders whose order can change while the model trains."""

from lightning_megatrain.datamodules.dynamic_loader import DynamicLoader
from lightning_megatrain.datamodules.mixture import MixtureDataModule
from lightning_megatrain.datamodules.packing import PackedBlocks, PaddedDocuments, keeps_documents_apart
from lightning_megatrain.datamodules.planner import Delivered
from lightning_megatrain.datamodules.text_domains import Domain

__all__ = ["Delivered", "Domain", "DynamicLoader", "MixtureDataModule", "PackedBlocks", "PaddedDocuments", "keeps_documents_apart"]
