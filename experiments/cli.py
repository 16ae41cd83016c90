"""The commands of ``lm``: which there are, what each does in a line, and those that would be slow to ask for help.

A command is one function, whose signature is its options and whose docstring its help; it is imported when asked for.
"""

from pathlib import Path

from lm.config import SettingError

RUNS = Path("runs")
COMMANDS = {  # name -> module of experiments : function
    "list": "commands:show_rows",
    "show": "commands:show_settings",
    "diff": "commands:show_diff",
    "run": "rows:run",
    "plan": "rows:plan",
    "sweep": "rows:sweep",
    "report": "commands:show_report",
    "verify": "verify:verify_runs",
    "clean": "cleaning:clean",
    "tasks": "task_list:show_tasks",
    "score": "cli:score",
    "generate": "inspection:generate",
    "fill": "inspection:fill_in",
    "attention": "cli:attention",
    "convert": "conversion:import_or_export",
    "examples": "inspection:show_examples",
    "doctor": "doctor:examine",
}
RAW = ("run", "sweep", "plan", "convert")  # read their arguments themselves: what their options are depends on them
HELP = """\
list       List the rows of the study, what each changes, and how many seeds of it have finished.
show       Show every setting of a row, with its meaning and unit.
diff       Show the settings in which a row differs from another.
run        Train, fine-tune and evaluate one row; any of its settings can be changed on the command line.
plan       Compile rows for a TPU slice that need not be there: memory, time and hours before they are paid for.
sweep      Train and evaluate every row that matches and has not finished, then write the report.
report     Write the tables of all finished runs beside the paper's: Markdown, a page for the browser, CSV and pictures.
verify     Check every file of the checkpoints of runs against the checksums that were saved with them.
clean      Turn a folder of texts, JSON lines or WET files into a corpus by the rules that made C4.
tasks      List the tasks: how each is answered and scored, and the rows of what is prepared here.
score      Score a run or an imported checkpoint on tasks, or predictions that were made elsewhere.
generate   Show what a run's model writes after prompts: the likeliest words, drawn ones, or the best of a beam search.
fill       Show what a masked language model puts for each [MASK] of a text: "Paris is the [MASK] of France."
attention  Draw where each head of a run's model looks in a text, a row a layer.
convert    Import a published checkpoint as a run, or export a run's model in the published format.
examples   Print pre-training and fine-tuning examples of a row, decoded: inputs and targets as the model sees them.
doctor     Show devices, versions, data found and free disk space."""


def score(
    run: Path | None = None,
    /,
    tasks: str = "",
    split: str = "validation",
    mixture: str = "",
    limit: int = 0,
    predictions: Path | None = None,
    task: str = "",
    runs: Path = RUNS,
) -> None:
    """Score a run or an imported checkpoint on tasks, or predictions that were made elsewhere.

    Answers and scores go to RUN/scores/PHASE/TASK/SPLIT.

    Args:
        run: folder of a run.
        tasks: names of tasks or mixtures, with commas between them, such as glue_small,squad.
        split: split of the data sets; may be one of TFDS's expressions, such as 'validation[:10%]'.
        mixture: which fine-tuned model answers; by default one tuned for the task, else the pre-trained one.
        limit: rows of each task, from its start; 0 takes all.
        predictions: file of predictions to score: a text a line, or .jsonl with {"prediction": ...} lines.
        task: the task that the predictions are for.
        runs: folder that holds the prepared data; of a run it is found beside it.
    """
    from experiments.scoring import score_file, score_run

    if run is not None and tasks and predictions is None:
        score_run(run, tasks.split(","), split, mixture, limit)
    elif predictions is not None and task and run is None:
        score_file(predictions, task, split, limit, runs)
    else:
        raise SettingError("lm score takes RUN --tasks NAME,NAME or --predictions FILE --task NAME")


def attention(run: Path, /, text: str, mixture: str = "", out: Path = Path("attention.png")) -> None:
    """Draw where each head of a run's model looks in a text, a row a layer.

    Args:
        run: folder of a run.
        text: what the model reads; an encoder-decoder is watched writing its answer.
        mixture: which fine-tuned model; by default the pre-trained one.
        out: picture to write, .png, .svg or .pdf.
    """
    from experiments.attention_maps import show_attention

    show_attention(run, text, mixture, out)
