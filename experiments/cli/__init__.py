"""The commands of ``lm``: which there are, where each is, and what it does in a line.

A command is one function, whose signature is its options and whose docstring its help; it is imported when
asked for.
"""

from collections.abc import Callable
from importlib import import_module

COMMANDS = {  # name -> module of experiments.cli : function
    "list": "show:show_rows",
    "show": "show:show_command",
    "diff": "show:diff_command",
    "run": "train:run_command",
    "plan": "plan:plan",
    "prepare": "plan:prepare_row",
    "sweep": "train:sweep_command",
    "report": "show:report_command",
    "verify": "doctor:verify_runs",
    "clean": "clean:clean",
    "tasks": "doctor:show_tasks",
    "score": "score:score",
    "likelihood": "likelihood:likelihood",
    "harness": "likelihood:harness",
    "generate": "models:generate",
    "fill": "models:fill_in",
    "draw": "draw:draw",
    "attention": "draw:attention",
    "neighbours": "models:show_neighbours",
    "convert": "convert:import_or_export",
    "examples": "models:examples_command",
    "doctor": "doctor:examine",
    "completion": "usage.completion:completion",
}
# read their arguments themselves: what their options are depends on them
RAW = ("show", "diff", "run", "sweep", "report", "plan", "prepare", "convert", "draw", "examples", "harness")
HELP = """\
list       List the rows of the study, what each changes, and how many seeds of it have finished.
show       Show every setting of a row or a published model, or --stages of its run, or what it --costs.
diff       Show the settings in which a row differs from another.
run        Train, fine-tune and evaluate one row; any of its settings can be changed on the command line.
plan       Compile rows for a TPU slice that need not exist: memory, time and hours before you pay for them.
prepare    Encode what a row reads of its corpus ahead of its training, with all cores, and say what it takes.
sweep      Train and evaluate every row that matches and has not finished, then write the report.
report     Write the tables of all finished runs beside the paper's: Markdown, a web page, CSV and pictures.
verify     Check every file of the checkpoints of runs against the checksums that were saved with them.
clean      Turn a folder of texts, JSON lines or WET files into a corpus by the rules that made C4.
tasks      List the tasks: how each is answered and scored, and the rows of what is prepared here.
score      Score a run or an imported checkpoint on tasks, or predictions that were made elsewhere.
likelihood Show the log-probability of texts, or of continuations of contexts: nats, and bits per byte.
harness    Evaluate a run by lm-evaluation-harness: its options, with --model_args run=RUN.
generate   Show what a run's model writes after prompts: greedy, sampled or beam search.
fill       Show what a masked language model puts for each [MASK] of a text: "Paris is the [MASK] of France."
draw       Draw masks, positions, what a model does with a text, what it costs here; alone: list the pictures.
attention  Draw where each head of a run's model attends in a text.
neighbours Show the pieces whose vectors are nearest to a word's: of skip-gram, or of a model's embedding.
convert    Import a checkpoint of Hugging Face's transformers as a run, or export a run's model as one.
examples   Print pre-training and fine-tuning examples of a row, decoded, as the model sees them.
doctor     Show devices, versions, data found and free disk space.
completion Print a script by which bash, zsh or fish completes commands, rows, runs and options."""


_RUN = "runs/nano/t5/1-baseline/baseline/seed-0"
EXAMPLES = {  # command -> two that work
    "list": ("lm list", "lm list 't5/6-*' --scale mini"),
    "show": ("lm show t5/6-corruption-rate/50", "lm show llama-7b --costs"),
    "diff": ("lm diff t5/6-corruption-rate/50", "lm diff t5/1-baseline/baseline --scale nano --to mini"),
    "run": (
        "lm run t5/1-baseline/baseline",
        "lm run gpt/base --data.corpus text:book.txt --pretraining.steps 500",
    ),
    "plan": (
        "lm plan t5/1-baseline/baseline --scale base --topology v5e:4x4",
        "lm plan 't5/2-architecture/*' --scale small --search",
    ),
    "prepare": (
        "lm prepare t5/1-baseline/baseline --check",
        "lm prepare t5/1-baseline/baseline --scale base --tokens 2e9",
    ),
    "sweep": (
        "lm sweep t5/6-corruption-rate --seeds 3",
        "lm sweep 't5/4-*' --pretraining.optimizer.learning-rate 0.5",
    ),
    "report": (
        "lm report t5/6-corruption-rate",
        "lm report 't5/*' --scale mini --runs runs gs://bucket/runs",
    ),
    "verify": ("lm verify runs", f"lm verify {_RUN}"),
    "clean": ("lm clean pages --name mine", "lm clean crawl --name web --without policy --workers 8"),
    "tasks": ("lm tasks", "lm tasks 'multi30k*'"),
    "score": (
        f"lm score {_RUN} --tasks documentation-words",
        "lm score --predictions answers.txt --task squad",
    ),
    "likelihood": (f"lm likelihood {_RUN} book.txt", f"lm likelihood {_RUN} documentation --texts 10"),
    "harness": (
        f"lm harness --model_args run={_RUN} --tasks hellaswag",
        f"lm harness --model_args run={_RUN},max_length=512 --tasks lambada_openai --limit 100",
    ),
    "generate": (
        f"lm generate {_RUN} --mixture documentation-sentences --prompt 'summarize: ...'",
        "lm generate runs/nano/gpt/base/seed-0 --prompt 'Once' --temperature 0.8 --top-p 0.9",
    ),
    "fill": ("lm fill 'Paris is the [MASK] of France.'", f"lm fill 'Paris is [MASK].' --run {_RUN} --top 3"),
    "draw": ("lm draw masks", f"lm draw attention {_RUN} --text 'The cat sat.'"),
    "attention": (
        f"lm attention {_RUN} --text 'The cat sat.'",
        f"lm attention {_RUN} --text 'The cat sat.' --out heads.svg",
    ),
    "neighbours": (
        f"lm neighbours {_RUN} --words file string",
        "lm neighbours runs/nano/vectors/negative/seed-0 --words file --count 3",
    ),
    "convert": ("lm convert import bert-base-uncased runs/bert", f"lm convert export {_RUN} my-t5"),
    "examples": ("lm examples t5/5-bert-style/replace-spans", "lm examples bert/base --count 1"),
    "doctor": ("lm doctor", "lm doctor --runs elsewhere"),
    "completion": ("lm completion bash", "lm completion zsh > _lm"),
}
EXAMPLES |= {f"convert {way}": EXAMPLES["convert"] for way in ("import", "export")}


def function_of(name: str) -> Callable:
    """The function of a command, which is imported now."""
    module, _, function = COMMANDS[name].partition(":")
    return getattr(import_module(f"experiments.cli.{module}"), function)
