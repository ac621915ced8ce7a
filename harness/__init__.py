"""llamaduel: one model on several engines and placements, measured so that the answer can be trusted."""
