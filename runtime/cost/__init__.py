"""Cost: seconds of devices, energy and money, by request, key, loop, generation and success."""
