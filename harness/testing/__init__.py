"""For adapter authors: engines with scripted timing and faults, and the suite that every adapter passes."""
