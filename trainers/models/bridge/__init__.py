"""The bridge way: Megatron's layers as NVIDIA's Megatron-Bridge builds and fills them."""
