"""What our agent's path costs on top of vLLM."""
