"""Checkpoints from one form into another: Hugging Face folders and Megatron's distributed checkpoints.

Every conversion is a plan between two layouts (parallel/reshard) whose tensors lie at known bytes of files; see
docs/checkpoints.md.
"""
