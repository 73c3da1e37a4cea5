"""Access to the GPUs: NVML facade, CUDA vector-add, inventories."""
