"""Training in TensorFlow and Keras: ``training.tf.sok``. docs/tensorflow.md has examples."""
