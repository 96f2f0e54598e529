"""Behavior-preserving KV-cache compression: evict only what the model's own next-token distribution does not miss."""

__version__ = "0.1.0"
