"""Speculative decoding of language models: train drafts, generate exactly, measure honestly."""

__version__ = "0.1.0"
