"""``lm completion``: a script by which a shell completes commands, rows, scales and options."""

from typing import Literal

from experiments.cli.app import print_completion


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script by which bash, zsh or fish completes commands, rows, scales and options.

    Write it again after an update: it holds the rows and options of this version.

        lm completion bash > ~/.local/share/bash-completion/completions/lm
        lm completion zsh > ~/.zfunc/_lm

    Args:
        shell: The shell that reads the script.
    """
    print_completion(shell)
