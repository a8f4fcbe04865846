"""The dense network: one definition of each layer, and the engines that run it."""
