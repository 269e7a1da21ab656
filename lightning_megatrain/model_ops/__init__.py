"""Questions to the model being trained: losses, embeddings, text and gradients of single samples, batched and without a trace."""

from lightning_megatrain.model_ops.dataset import over_dataset
from lightning_megatrain.model_ops.embeddings import Pooling, embed, pool
from lightning_megatrain.model_ops.generation import generate
from lightning_megatrain.model_ops.gradients import GradientSettings, gradient_features
from lightning_megatrain.model_ops.losses import compute_sample_losses, sample_losses, token_losses
from lightning_megatrain.model_ops.store import FeatureKey, FeatureStore, data_fingerprint, feature_key
from lightning_megatrain.model_ops.trace import leave_no_trace

__all__ = [
    "FeatureKey",
    "FeatureStore",
    "GradientSettings",
    "Pooling",
    "compute_sample_losses",
    "data_fingerprint",
    "embed",
    "feature_key",
    "generate",
    "gradient_features",
    "leave_no_trace",
    "over_dataset",
    "pool",
    "sample_losses",
    "token_losses",
]
