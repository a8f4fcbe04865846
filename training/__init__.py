"""Layer 3: makes models. PyTorch lives here and nowhere else."""
