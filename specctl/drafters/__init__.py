"""Where drafted tokens come from: one file a drafter, all behind the protocol in `base.py`."""
