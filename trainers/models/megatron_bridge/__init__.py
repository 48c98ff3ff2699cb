"""The backend megatron-bridge: Megatron's layers as NVIDIA's Megatron-Bridge builds them."""
