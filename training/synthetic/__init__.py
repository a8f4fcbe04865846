"""Generated samples with a planted truth, so the best AUC is known."""

from training.synthetic.generator import generate_for

__all__ = ["generate_for"]
