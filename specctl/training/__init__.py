"""Training: one loop for targets and drafts, and `ensure`, which trains what a run lacks."""
