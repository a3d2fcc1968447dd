"""Experiments: values in, values out. Nothing here prints."""
