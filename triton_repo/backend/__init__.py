"""What runs inside Triton's Python backend: requests in, the engine loop, responses out."""
