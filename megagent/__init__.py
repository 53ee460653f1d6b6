"""megagent trains multi-turn LLM agents by reinforcement learning at Megatron scale."""

__version__ = "0.1.0"
