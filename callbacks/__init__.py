"""Policies that choose the data while the model trains."""
