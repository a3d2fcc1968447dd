"""What `make bench` runs: small scripts over the public API, JSON on stdout."""
