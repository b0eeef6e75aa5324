"""Asynchronous off-policy reinforcement learning for language models around an Arrow replay buffer."""

__version__ = "0.1.0"
