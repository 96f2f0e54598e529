"""Prints, as JSON, the classes of TensorRT's Python bindings with the docstrings of their members."""

import json

import tensorrt_bindings as trt

classes = {name: value for name, value in vars(trt).items() if isinstance(value, type)}
print(
    json.dumps(
        {
            name: {member: getattr(kind, member).__doc__ or "" for member in dir(kind) if not member.startswith("_")}
            for name, kind in classes.items()
        }
    )
)
