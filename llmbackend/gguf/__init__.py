"""GGUF files, as a model directory for the adapter and as tensors for the engine. Begin at `model_directory`."""
