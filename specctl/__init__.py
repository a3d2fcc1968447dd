"""Speculative decoding of language models: train drafts, generate exactly, measure honestly."""

import os

__version__ = "0.1.0"

# Between parallel regions OpenMP's threads spin for milliseconds, and take them from whatever else runs: beside a busy
# neighbour decoding became seven times slower. It is read when torch is loaded, so it is set before.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
