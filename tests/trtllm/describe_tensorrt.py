"""Prints, as JSON, what TensorRT's Python bindings define: of a class, its members and their docstrings."""

import json

import tensorrt_bindings as trt

print(
    json.dumps(
        {
            name: {member: getattr(value, member).__doc__ or "" for member in dir(value) if not member.startswith("_")}
            for name, value in vars(trt).items()
        }
    )
)
