"""Tables in training, without PyTorch and TensorFlow: rows, what a table is like, and how optimizers move rows."""
