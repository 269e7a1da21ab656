"""`CausalLM`: a Hugging Face causal language model as a LightningModule, trained on long contexts slice by slice."""

from lightning_megatrain.language_model.causal_lm import CausalLM
from lightning_megatrain.language_model.device_memory import device_peak_bytes

__all__ = ["CausalLM", "device_peak_bytes"]
