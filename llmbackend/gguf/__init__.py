"""Reads GGUF files: as a model directory for the adapter, and as tensors for the engine. Start at `model_directory`."""
