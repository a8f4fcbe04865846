"""The dense network: each layer once, and the engines that run it."""
