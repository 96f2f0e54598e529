"""Engines: what BP-KV adds to a TensorRT-LLM network, written against TensorRT's own network API.

Nothing here imports TensorRT: its module comes with the network that layers are added to.
"""
