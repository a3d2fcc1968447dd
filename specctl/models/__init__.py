"""Models, caches and checkpoints: everything that turns token ids into logits."""
