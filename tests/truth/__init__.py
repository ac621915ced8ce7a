"""The protocol against simulated engines whose true speed is known."""
