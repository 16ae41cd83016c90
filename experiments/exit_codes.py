"""What the exit codes of ``lm`` mean."""

EXIT_CODES = {"done": 0, "failed": 1, "bad settings": 2, "loss not finite": 3, "interrupted": 130}
