"""Adapters: one file an engine, shared pieces beside them."""
