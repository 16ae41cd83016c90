"""``lm completion``: a script by which a shell completes commands, rows, runs and options.

All words stand in the script, so that completing starts no Python; runs are folders, which the shell finds.
"""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from string import Template
from typing import Literal

from experiments.cli import COMMANDS, HELP, RAW, function_of
from experiments.cli.usage.options import options_of
from experiments.cli.usage.page import opposite
from experiments.study.registry import REGISTRY, TABLES
from experiments.study.scales import SCALES

Shell = Literal["bash", "zsh", "fish"]
OF_ROWS = ("list", "show", "diff", "run", "plan", "prepare", "sweep", "report", "examples")
RUN_FOLDERS = ("runs/*/*/*/seed-*", "runs/*/*/*/*/seed-*")
OF_RUNS = ("verify", "score", "likelihood", "generate", "attention", "neighbours", "draw", "convert")

_BASH = """# lm completion bash > ~/.local/share/bash-completion/completions/lm
_lm() {
  local word=$${COMP_WORDS[COMP_CWORD]} before=$${COMP_WORDS[COMP_CWORD-1]} words=
  if [ "$$COMP_CWORD" = 1 ]; then words='$commands'
  elif [ "$$before" = --scale ] || [ "$$before" = --to ]; then words='$scales'
  elif [[ $$word == -* ]]; then
    case $${COMP_WORDS[1]} in
$options
    esac
  else
    case $${COMP_WORDS[1]} in
      $of_rows) words='$rows' ;;
      $of_runs) words=$$(for f in $runs; do compgen -G "$$f"; done) ;;
      help) words='$commands' ;;
      completion) words='bash zsh fish' ;;
    esac
  fi
  COMPREPLY=($$(compgen -W "$$words" -- "$$word"))
}
complete -o default -F _lm lm
"""
_ZSH = """#compdef lm
# lm completion zsh > _lm, in a folder of $$fpath; or in ~/.zshrc: source <(lm completion zsh)
_lm() {
  local words_of=
  if (( CURRENT == 2 )); then words_of='$commands'
  elif [[ $$words[CURRENT-1] == (--scale|--to) ]]; then words_of='$scales'
  elif [[ $$words[CURRENT] == -* ]]; then
    case $$words[2] in
$options
    esac
  else
    case $$words[2] in
      $of_rows) words_of='$rows' ;;
      $of_runs) compadd -- $globs ;;
      help) words_of='$commands' ;;
      completion) words_of='bash zsh fish' ;;
    esac
    _files
  fi
  compadd -- $${=words_of}
}
compdef _lm lm
"""
_FISH = """# lm completion fish > ~/.config/fish/completions/lm.fish
complete -c lm -n __fish_use_subcommand -f
$described
complete -c lm -n '__fish_seen_subcommand_from $rows_of' -a '$rows'
complete -c lm -n '__fish_seen_subcommand_from $runs_of' -a '(string join \\n $runs)'
complete -c lm -n '__fish_seen_subcommand_from help' -xa '$commands'
complete -c lm -n '__fish_seen_subcommand_from completion' -xa 'bash zsh fish'
complete -c lm -l scale -xa '$scales'
$options
"""


def completion(shell: Shell, /) -> None:
    """Print a script by which bash, zsh or fish completes commands, rows, runs and options.

    Make it again after an update: it holds the names of rows and options of this version.

    Args:
        shell: bash, zsh or fish.
    """
    print(script_of(shell), end="")


def script_of(shell: Shell) -> str:
    """The script for a shell."""
    commands = [*COMMANDS, "help"]
    flags = {name: flags_of(name) for name in COMMANDS}
    rows = " ".join([*REGISTRY, *TABLES])
    values = {"commands": " ".join(commands), "scales": " ".join(SCALES), "rows": rows}
    values |= {"runs": " ".join(RUN_FOLDERS), "globs": " ".join(f"{glob}(N)" for glob in RUN_FOLDERS)}
    values |= {"of_rows": "|".join(OF_ROWS), "of_runs": "|".join(OF_RUNS)}
    if shell == "fish":
        values |= {"rows_of": " ".join(OF_ROWS), "runs_of": " ".join(OF_RUNS)}
        lines = [line.split(maxsplit=1) for line in HELP.splitlines()]
        start = "complete -c lm -n __fish_use_subcommand -a"
        values["described"] = "\n".join(f"{start} {name} -d {_quoted(meaning)}" for name, meaning in lines)
        seen = "complete -c lm -n '__fish_seen_subcommand_from"
        each = [f"{seen} {name}' -l {flag[2:]}" for name, some in flags.items() for flag in some]
        return Template(_FISH).substitute(values, options="\n".join(each))
    target = "words" if shell == "bash" else "words_of"
    cases = [f"      {name}) {target}='{' '.join(some)}' ;;" for name, some in flags.items()]
    return Template(_BASH if shell == "bash" else _ZSH).substitute(values, options="\n".join(cases))


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def flags_of(name: str) -> list[str]:
    """The options of a command; of one that reads its arguments itself, as its help lists them."""
    function = function_of(name)
    if name in RAW:
        return sorted({"--help", *re.findall(r"^  (--[a-z][\w.-]*)", _help_of(function), re.MULTILINE)})
    options = [each for each in options_of(function) if not each.in_place]
    switches = [opposite(each) for each in options if each.kind is bool]
    return sorted(["--help", *(each.flag for each in options), *switches])


def _help_of(command: Callable) -> str:
    with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):
        command(["--help-all"])
    return text.getvalue()
