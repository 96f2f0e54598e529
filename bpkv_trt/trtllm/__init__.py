"""TensorRT-LLM engines: what is added to a model's network. Nothing here imports TensorRT until it is used."""
