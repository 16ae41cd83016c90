"""What the exit codes of ``lm`` mean."""

EXIT_CODES = {
    "done": 0,
    "failed": 1,
    "bad settings": 2,
    "loss not finite": 3,
    "start again": 42,  # asked to stop by SIGTERM, having saved; or another process is gone
    "interrupted": 130,  # by Ctrl-C
}
