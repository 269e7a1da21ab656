"""Data that can change while the model trains."""
