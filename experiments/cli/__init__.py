"""The commands of ``lm``: the function of each, and its help in a line.

A command is one function, whose signature is its options and whose docstring its help; it is imported when
it is called.
"""

from typing import NamedTuple

from experiments.figures import FIGURES


class Command(NamedTuple):
    """A command of ``lm``."""

    place: str  # module:function
    about: str  # its help in a line


_DELETING = (
    "a run is a folder: delete its seed-N and the links to it, runs/NAME and perhaps runs/last "
    "(docs/questions.md, 'How do I move or delete runs?')"
)
# commands that users of other programs look for -> what to do instead
ABSENT_COMMANDS = dict.fromkeys(("delete", "remove", "rm", "prune"), _DELETING) | {
    "clean": f"{_DELETING}; lm data clean cleans text"
}
HELP_OPTIONS = ("-h", "--help", "--help-all")
_HERE = "experiments.cli"
COMMANDS = {
    "demo": Command(
        f"{_HERE}.demo:demo",
        "Train a small decoder and the first table of the study: six minutes on two cores.",
    ),
    "list": Command(
        f"{_HERE}.list_rows:list_rows",
        "List the rows of the study, what each changes, and how many seeds have finished.",
    ),
    "show": Command(
        f"{_HERE}.show:show",
        "Show the settings of a row or a published model; --diff, --examples, --stages, --costs show more.",
    ),
    "run": Command(f"{_HERE}.run:run", "Train, fine-tune and evaluate one row; any setting can be changed."),
    "sweep": Command(
        f"{_HERE}.sweep:sweep", "Train all rows of a table, or a grid of settings, and write the report."
    ),
    "status": Command(
        f"{_HERE}.status:status",
        "Show the runs in progress and those that stopped; --all also lists finished ones.",
    ),
    "report": Command(
        f"{_HERE}.report:report", "Write the tables of finished runs beside the paper's, with pictures."
    ),
    "power": Command(
        f"{_HERE}.power:power", "Show the smallest difference that a table can detect, by number of seeds."
    ),
    "ladder": Command(
        f"{_HERE}.ladder:ladder", "Show how loss falls with compute, and what the smaller sizes predict."
    ),
    "eval tasks": Command(
        f"{_HERE}.eval_tasks:eval_tasks", "Score a run or an imported checkpoint on tasks, also by prompts."
    ),
    "eval predictions": Command(
        f"{_HERE}.eval_tasks:eval_predictions", "Score predictions in a file, made by any program."
    ),
    "eval likelihood": Command(
        f"{_HERE}.eval_likelihood:eval_likelihood",
        "Show the log-probability of texts: nats, perplexity, bits per byte.",
    ),
    "eval harness": Command(
        f"{_HERE}.eval_harness:eval_harness", "Evaluate a run with lm-evaluation-harness; takes its options."
    ),
    "generate": Command(
        f"{_HERE}.generate:generate", "Continue or answer prompts, or fill the gaps of texts with [MASK]."
    ),
    "predict": Command(
        f"{_HERE}.predict:predict", "Print what a run's fine-tuned head says of each line of a file."
    ),
    "embed": Command(f"{_HERE}.predict:embed", "Write a vector for each line of a file."),
    **{f"draw {what}": Command(figure.target, figure.summary) for what, figure in FIGURES.items()},
    "draw neighbours": Command(
        f"{_HERE}.draw:neighbours", "Print the tokens whose vectors are nearest to a word's."
    ),
    "data prepare": Command(
        f"{_HERE}.data_prepare:data_prepare", "Tokenize the text that a row reads before its training."
    ),
    "data clean": Command(
        f"{_HERE}.data_clean:data_clean", "Clean text files, JSON lines or WET files by the rules of C4."
    ),
    "data tasks": Command(
        f"{_HERE}.data_tasks:data_tasks", "List the tasks, their metrics, and whether their data are here."
    ),
    "data course": Command(
        f"{_HERE}.data_course:data_course", "Unpack the small trained models that the course draws."
    ),
    "convert import": Command(
        f"{_HERE}.convert:import_checkpoint", "Turn a checkpoint of Hugging Face's transformers into a run."
    ),
    "convert export": Command(
        f"{_HERE}.convert:export_checkpoint", "Write a run's model in the format of transformers."
    ),
    "convert push": Command(
        f"{_HERE}.convert_push:push_checkpoint", "Upload an exported model to the Hugging Face hub."
    ),
    "entry run": Command(
        f"{_HERE}.entry:entry_run", "Train and measure an entry of the public table, and seal its archive."
    ),
    "entry verify": Command(
        f"{_HERE}.entry:entry_verify", "Check an entry's archive and train one of its seeds again."
    ),
    "entry table": Command(
        f"{_HERE}.entry:entry_table", "Print the table of entries, and draw how the best score fell."
    ),
    "plan": Command(
        f"{_HERE}.plan:plan", "Compile rows for a TPU slice that need not exist: memory, time, cost."
    ),
    "launch gce": Command(
        f"{_HERE}.launch:launch_gce", "Run rows on slices of Compute Engine: v5p, v6e, TPU7x."
    ),
    "launch queued": Command(
        f"{_HERE}.launch:launch_queued", "Run rows on slices by queued resources: v4, v5e, v5p, v6e."
    ),
    "launch gke": Command(f"{_HERE}.launch:launch_gke", "Submit rows to GKE as JobSets, by xpk."),
    "launch slurm": Command(f"{_HERE}.launch:launch_slurm", "Submit rows to Slurm as a job array."),
    "launch local": Command(f"{_HERE}.launch:launch_local", "Run rows on this machine in several processes."),
    "launch image": Command(
        f"{_HERE}.launch:launch_image", "Build and push the container image that the machines run."
    ),
    "launch list": Command(f"{_HERE}.launch:launch_list", "List the slices that are there now."),
    "launch delete": Command(f"{_HERE}.launch:launch_delete", "Delete slices, whatever they are doing."),
    "doctor": Command(
        f"{_HERE}.doctor:doctor", "Show devices, versions, data and disk; --verify checks checkpoints."
    ),
    "completion": Command(
        f"{_HERE}.completion:completion", "Print a completion script for bash, zsh or fish."
    ),
}
# first words of commands that have subcommands, with a line of help
GROUPS = {
    "eval": "Evaluate a run: tasks, predictions, likelihood, harness.",
    "draw": "Draw masks, positions, costs, or what a model does with a text; lm draw lists the pictures.",
    "data": "Prepare and clean corpora, list tasks, unpack trained models: prepare, clean, tasks, course.",
    "convert": "Import, export and upload checkpoints of transformers: import, export, push.",
    "entry": "Enter a language model in the public table: run, verify, table.",
    "launch": "Run rows in a cloud or on a cluster: gce, queued, gke, slurm, local, image, list, delete.",
}


def overview() -> str:
    """Return a line for each command, and one for each group of commands."""
    abouts: dict[str, str] = {}
    for name, command in COMMANDS.items():
        group = name.partition(" ")[0]
        abouts[group] = GROUPS.get(group, command.about)
    return "\n".join(f"{name:<11}{about}" for name, about in abouts.items())
