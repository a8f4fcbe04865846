"""Layer 3: train models. PyTorch is imported here and nowhere else."""
