"""Engines: the plugin in a TensorRT network, and what it needs around it."""
