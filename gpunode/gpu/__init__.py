"""What the GPUs are and do: NVML facade, CUDA vector-add, simulated GPUs."""
